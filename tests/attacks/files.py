"""Files of strangers, read by the commands: each in a process of its own, beside a module that leaves a mark."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from tests.attacks.attack import Attack, check_words
from tests.axlearn_like.checkpoint import hostile_checkpoints
from tests.axlearn_like.run.test_planted import FILES
from tests.mesh.files.test_written import AS_ROOT, OTHER, PLANTED
from tests.models.huggingface.checkpoints import hostile_models
from tests.rl.runtime.test_cluster_file import HOSTILE
from tests.rl.tiny import tiny_experiment
from tests.test_floors import ROOT
from tests.tools.commands.test_consent import KEY, Endpoint, judged
from tests.tools.commands.test_serve import TINY, save_run

EVIL = "evil_module"
_MODELS = ("a header with a deep header", "config.json is ten sparse gigabytes", "head_dim=1000000000")
_CHECKPOINTS = ("chunks: an axis of the manifest is 1000000000000", "orbax: params/_METADATA is a pipe")
_PATIENCE = 240.0  # seconds of a command, on a busy machine


class Folder:
    """A folder of a user, with a module that leaves a mark when it is imported, and a secret."""

    def __init__(self, path: Path):
        self.path, self._count = path, 0
        self.secret = path / "secret"
        self.secret.write_text("a key of the user's")
        (path / f"{EVIL}.py").write_text(f"open({str(path / 'mark')!r}, 'w')\n")
        save_run(path / "trained", tiny_experiment())

    def run(self, *, trained: bool = False) -> Path:
        """Return a new run directory."""
        self._count += 1
        path = self.path / f"run-{self._count}"
        if trained:
            shutil.copytree(self.path / "trained", path)
        else:
            path.mkdir()
            (path / "config.txt").write_text(to_text(tiny_experiment()))
        return path

    def cut_off(self) -> Path:
        """Return a new run directory of a job that lost its newest checkpoint."""
        if not (whole := self.path / "whole").is_dir():
            self.axl("rl", TINY, "--run-dir", whole, "--runtime", "inprocess", expected=(0,))
            newest = max((whole / "checkpoints" / "rl").iterdir(), key=lambda path: int(path.name))
            shutil.rmtree(newest)
        self._count += 1
        shutil.copytree(whole, path := self.path / f"run-{self._count}")
        return path

    def axl(
        self,
        *words: str | Path,
        expected: tuple[int, ...] = (2,),
        environ: dict[str, str] | None = None,
        says: str = "",
    ) -> str:
        """Run a command to its end; returns its last line. AssertionError: it was moved, or said another."""
        path = os.pathsep.join([str(self.path), str(ROOT), *filter(None, sys.path)])
        env = {**os.environ, "PYTHONPATH": path, "AXL_ALLOW": "", **(environ or {})}
        command = [sys.executable, "-m", "tools.cli", *map(str, words)]
        done = subprocess.run(command, cwd=self.path, env=env, capture_output=True, timeout=_PATIENCE, check=False)
        said = (done.stdout + done.stderr).decode()
        assert done.returncode in expected, f"status {done.returncode}: {said[-600:]}"
        assert not (self.path / "mark").exists(), f"a stranger's module was imported: {said[-600:]}"
        assert self.secret.read_text() == "a key of the user's", "the user's file was changed"
        assert says in said, f"it said {said[-600:]}"
        return check_words(said.replace(str(self.path), "")).removeprefix("axl: ")[:160]


def _config(text: str, command: str, folder: Folder) -> str:
    run = folder.run()
    (run / "config.txt").write_text(f"{text}\n# code: {folder.path / f'{EVIL}.py'}\n")
    return folder.axl(command, run, says="the root: expected" if text.startswith("[") else "a config may not name")


def _judge(folder: Folder) -> str:
    run = folder.run(trained=True)
    with Endpoint() as endpoint:
        (run / "config.txt").write_text(to_text(judged(endpoint)))
        words = ("eval", run, "--problems", "1", "--samples", "1", "--out", run / "out")
        said = folder.axl(*words, environ={KEY: "the secret of somebody"}, says=f"--allow {KEY}@http")
        assert endpoint.seen == []
    return said


def _cluster(content: str, folder: Folder) -> str:
    run = folder.run()
    (run / "cluster.json").write_text(content)
    return folder.axl("worker", run, says="cluster.json: ")


def _report(folder: Folder) -> str:
    run = folder.run()
    for name in ("metrics.jsonl", "events.jsonl", "report.json"):
        (run / name).write_text('{"phase": "\x1b]0;x\x07<script>", "step": 1e999}\n[[[[{\n' + "\x00\u202e" * 1000)
    (run / "skipped.jsonl").symlink_to(folder.secret)
    os.mkfifo(run / "data.json")
    said = folder.axl("report", run, expected=(0,))
    page = (run / "report.html").read_text()
    assert "<script" not in page and "a key of the user's" not in page
    return said


def _planted(name: str, file: str, folder: Folder) -> str:
    """Resume a run that was cut off at update 2 and in which a file was replaced."""
    run = folder.cut_off()
    place = run / file
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    PLANTED[name](place, folder.secret)
    words = ("rl", TINY, "--run-dir", run, "--runtime", "inprocess")
    return folder.axl(*words, expected=(0, 2))


def _make(cases: ModuleType, name: str, place: Path) -> None:
    """Let a hostile case write its files; it then reads them itself, and what that raises is its own test's."""
    place.mkdir()
    cases.prepare()
    try:
        with contextlib.suppress(Exception):
            cases.CASES[name](place)
    finally:
        cases.finish()


def _model(name: str, folder: Folder) -> str:
    """Serve and import a directory that one of the hostile cases has made."""
    place = folder.path / f"model-{name[:8].replace(' ', '-')}-{os.getpid()}"
    _make(hostile_models, name, place)
    folder.axl("serve", place / "hf", "--port", "0", says="hf")
    return folder.axl("convert", "import", place / "hf", place / "out", says="hf")


def _checkpoint(name: str, folder: Folder) -> str:
    """Evaluate a run that begins with a checkpoint that one of the hostile cases has made."""
    place = folder.path / f"checkpoint-{name[:6]}-{os.getpid()}"
    _make(hostile_checkpoints, name, place)
    run = folder.run()
    shutil.copytree(place / "run" / "checkpoints", run / "checkpoints", copy_function=_copy)
    return folder.axl("eval", run, "--problems", "1", "--samples", "1", "--out", run / "out", says="checkpoint")


def _copy(source: str, target: str) -> None:
    """Copy a file, a pipe as one."""
    if Path(source).is_fifo():
        os.mkfifo(target)
    elif os.path.getsize(source) < 1 << 30:
        shutil.copyfile(source, target)


def _link_in_model(folder: Folder) -> str:
    from tests.models.huggingface.checkpoints.made import dense_model, make

    make(folder.path / "linked", dense_model())
    (folder.path / "linked" / "README.md").symlink_to(folder.secret)
    said = folder.axl("convert", "import", folder.path / "linked", folder.path / "imported", says="is a link to")
    assert not (folder.path / "imported").exists()
    return said


_KILLED = """
import os, signal, sys
from axlearn_like.run.directory import RunDirectory
RunDirectory.open(sys.argv[1], sys.stdin.read(), force=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _killed(folder: Folder) -> str:
    """Force another config, kill the command at once, and evaluate: of the first config."""
    run = folder.run(trained=True)
    other = to_text(tiny_experiment(max_new_tokens=3))
    done = subprocess.run([sys.executable, "-c", _KILLED, run], input=other, text=True, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL and (run / "config.txt").read_text() == other
    assert RunDirectory.attach(run).read_config() == (folder.path / "trained" / "config.txt").read_text()
    return folder.axl("eval", run, "--problems", "1", "--samples", "1", "--out", run / "out", expected=(0,))


def _programs(folder: Folder) -> str:
    """Plant a program in the cache, as one who may write there can."""
    cache = folder.path / "programs"
    environ = {"AXL_COMPILATION_CACHE": str(cache), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    run = folder.run(trained=True)
    words = ("eval", run, "--problems", "1", "--samples", "1", "--out")
    folder.axl(*words, run / "first", expected=(0,), environ=environ)
    entries = sorted(cache.glob("*-cache"))
    assert entries
    for number, entry in enumerate(entries):
        entry.write_bytes(b"a program of a stranger's")
        os.chown(entry, OTHER, OTHER) if AS_ROOT.args[0] is False and number % 2 else entry.chmod(0o666)
    folder.axl(*words, run / "second", expected=(0,), environ=environ)
    kept = [entry for entry in entries if entry.read_bytes() == b"a program of a stranger's"]
    assert len(kept) < len(entries) and all(entry.stat().st_uid == os.geteuid() for entry in set(entries) - set(kept))
    cache.chmod(0o777)
    return folder.axl(*words, run / "third", environ=environ, says="others may write it")


def _command(name: str, writes: str, holds: str, run: Callable[[Folder], str], quick: bool = False) -> Attack:
    return Attack(name, writes, holds, run, quick)


ATTACKS = (
    _command(
        "`axl eval`: names",
        "`module:name` of a module beside it",
        "nothing of it is imported",
        partial(_config, f"{EVIL}:C", "eval"),
        True,
    ),
    _command(
        "`axl serve`: names",
        "a function as a value of a config",
        "it is not called",
        partial(_config, f"axlearn_like.learner:Optax\ndirection: {EVIL}:f()", "serve"),
    ),
    _command(
        "`axl eval`: a config of 15 MB", "brackets", "a short refusal", partial(_config, "[" * 15_000_000, "eval")
    ),
    _command("`axl eval`: a judge", "an address, and the name of a variable with a key", "nothing is sent", _judge),
    _command("`axl eval`: a killed `--force`", "another config", "the first one counts", _killed),
    _command(
        "`axl worker`: a cluster elsewhere",
        "`cluster.json`",
        "consent is asked for",
        partial(_cluster, '{"address": "203.0.113.5:6379", "namespace": "x", "token": "theirs"}'),
        True,
    ),
    *(
        _command(
            f"`axl worker`: no cluster ({i})", f"`cluster.json`: `{text[:24]}`", "a refusal", partial(_cluster, text)
        )
        for i, text in enumerate(HOSTILE, 1)
    ),
    _command("`axl report`: garbage", "escapes, scripts, a pipe, a link to a secret", "a page without any", _report),
    *(
        _command(
            f"`axl rl`: {name} in a run", f"in place of `{file}`", "it is not followed", partial(_planted, name, file)
        )
        for name, file in zip(PLANTED, itertools.cycle(FILES), strict=False)
    ),
    *(
        _command(f"`axl serve`, `axl convert`: {name}", "a model", "a refusal", partial(_model, name))
        for name in _MODELS
    ),
    _command(
        "`axl convert`: a link in a model", "`README.md`, a link to a secret", "it is not copied", _link_in_model, True
    ),
    *(
        _command(f"`axl eval`: {name}", "a checkpoint", "a refusal", partial(_checkpoint, name))
        for name in _CHECKPOINTS
    ),
    _command("`axl eval`: programs", "entries of the cache of programs", "they are compiled again", _programs),
)
