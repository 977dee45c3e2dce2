"""`axl serve` as a process: it answers the official client, ends politely, and refuses what cannot be served."""

import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from axlearn_like.checkpoint.checkpointer import Checkpointer
from experiments.modifiers import low_rank
from mesh.files.bucket import Bucket
from rl.experiment import RLExperiment
from tests.bucket_server import bucket_server
from tests.rl.tiny import tiny_experiment, tiny_params, tiny_run
from tests.tools.test_cli import run_and_list_modules
from tools import cli

ROOT = Path(__file__).parents[3]
TINY = "tests.rl.tiny:tiny_experiment"
LONG = 400  # tokens


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint after two updates."""
    path = tmp_path_factory.mktemp("serve") / "mine"
    save_run(path, tiny_experiment())
    return path


def save_run(path: Path, cfg: RLExperiment.Config) -> None:
    """Make the run directory of an experiment, with a checkpoint of random parameters."""
    with tiny_run(path, cfg):
        checkpointer = Checkpointer.Config().build(directory=path / "checkpoints" / "rl")
        params: Any = tiny_params(cfg.policy)  # pyright: ignore[reportArgumentType]
        checkpointer.save(2, {"params": params, "step": np.int32(2)}, {})
        checkpointer.close()


class Served:
    """The process, its first line, and a client of it."""

    def __init__(self, process: "subprocess.Popen[str]", line: str):
        self.process, self.line = process, line
        found = re.search(r"http://[\d.]+:\d+/v1", line)
        assert found, line
        self.client = openai.OpenAI(base_url=found[0], api_key="secret", max_retries=0, timeout=60)

    def end(self, signum: signal.Signals) -> tuple[int, str]:
        """Send a signal; return the exit status and the rest of the output."""
        self.process.send_signal(signum)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """The command with the test's key and no warm-up, from its address on; killed at the end of the block."""
    command = [sys.executable, "-m", "tools.cli", "serve", *arguments, "--port", "0", "--api-key", "secret"]
    command += [] if "--warmup" in arguments else ["--warmup", "none"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            ready, _, _ = select.select([process.stdout], [], [], 240)
            lines = iter(process.stdout.readline, "") if ready else iter(())
            yield Served(process, next((line for line in lines if not line.startswith("fetching ")), ""))
        finally:
            process.kill()


@pytest.mark.slow
def test_a_run_is_served_and_sigterm_lets_it_finish(run_dir: Path) -> None:
    with serving(str(run_dir), "--set", f"max_new_tokens={LONG}", "--warmup", "full") as served:
        assert served.line.startswith("serving 'mine' (weights after 2 updates) at http://127.0.0.1:")
        assert [model.id for model in served.client.models.list()] == ["mine"]
        answer = served.client.chat.completions.create(
            model="mine", messages=[{"role": "user", "content": "2+2"}], max_tokens=3, seed=1, n=2
        )
        assert answer.usage is not None and answer.usage.completion_tokens <= 6
        with pytest.raises(openai.AuthenticationError):
            served.client.with_options(api_key="wrong").models.list()

        # One request is under way when the signal comes; it is answered in full.
        stream = served.client.completions.create(model="mine", prompt="a", logit_bias={"65": 100}, stream=True)
        text = next(stream).choices[0].text
        served.process.send_signal(signal.SIGTERM)
        chunks = [chunk.choices[0] for chunk in stream]
        assert text + "".join(chunk.text for chunk in chunks) == "A" * LONG
        assert chunks[-1].finish_reason == "length"
        out, _ = served.process.communicate(timeout=60)
        assert served.process.returncode == 0, out
        assert "stopping: unfinished requests have 30 s" in out
        assert "Traceback" not in out


@pytest.mark.full
def test_a_run_in_a_bucket_answers_as_the_run_itself(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, said = "gs://bucket/runs/mine", list[Any]()
    with bucket_server(monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        copied = {str(path.relative_to(run_dir)): path for path in run_dir.rglob("*") if path.is_file()}
        Bucket(url, "x").put(copied)
        for place in (str(run_dir), url):
            with serving(place) as served:
                assert served.line.startswith("serving 'mine' (weights after 2 updates) at http://127.0.0.1:")
                answer = served.client.chat.completions.create(
                    model="mine", messages=[{"role": "user", "content": "2+2"}], max_tokens=6, seed=1, logprobs=True
                )
                (choice,) = answer.choices
                assert choice.logprobs is not None and choice.logprobs.content
                said.append((choice.message.content, [token.logprob for token in choice.logprobs.content]))
                assert served.end(signal.SIGTERM)[0] == 0
    assert said[0] == said[1] and len(said[0][1]) > 1


@pytest.mark.full  # in every run a run is served, and ended by SIGTERM
def test_an_experiment_is_served_with_random_weights_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    adapted = tiny_experiment()
    low_rank(adapted)
    save_run(tmp_path / "sums", adapted)
    options = ["--set", "server.max_samples=2", "--grace", "5", "--adapter", f"sums={tmp_path / 'sums'}"]
    with serving(TINY, "--random-weights", *options) as served:
        assert served.line.startswith("serving 'tiny_experiment' (untrained) and 1 adapter at http://127.0.0.1:")
        assert [model.id for model in served.client.models.list()] == ["tiny_experiment", "sums"]
        create = served.client.completions.create
        assert create(model="sums", prompt="a", seed=3).model == "sums"
        with pytest.raises(openai.BadRequestError, match="n: got 3; expected an integer from 1 to 2"):
            create(model="tiny_experiment", prompt="a", n=3)
        assert create(model="tiny_experiment", prompt="a", seed=3).choices[0].finish_reason in ("stop", "length")
        status, out = served.end(signal.SIGINT)
        assert status == 0 and "unfinished requests have 5 s" in out and "Traceback" not in out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message with which the command refuses."""
    assert cli.main(["serve", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    message, prefix = printed.err.rstrip("\n"), "axl: error: "
    assert message.startswith(prefix) and "Traceback" not in message
    return message.removeprefix(prefix)


def test_a_port_in_use_is_refused_before_anything_is_loaded(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(capsys, str(run_dir), "--port", str(port))
    assert said.startswith(f"cannot listen on 127.0.0.1:{port} (--host, --port): ")


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, str(tmp_path)).startswith(f"{tmp_path} is not a run directory: it has no config.txt")
    assert refusal(capsys, str(tmp_path / "none")).startswith(f"no directory {tmp_path / 'none'}; expected a run")
    assert re.search("has no run in .*tiny_experiment; train it", refusal(capsys, TINY))
    with tiny_run(tmp_path / "young", tiny_experiment()):
        assert refusal(capsys, str(tmp_path / "young")).startswith(f"{tmp_path / 'young'} holds no weights yet")
    with tiny_run(tmp_path / "many", tiny_experiment()), tiny_run(tmp_path / "many/policies/a", tiny_experiment()):
        many = tmp_path / "many"
        said = f"{many} is a run of 1 policy (a); expected one of them, such as {many}/policies/a"
        assert refusal(capsys, str(many)).startswith(said)
    for source, why in (("many", "expected one of them, such as"), ("mny", "; did you mean 'many'?")):
        assert cli.main(["convert", "export", str(tmp_path / source), str(tmp_path / "out")]) == 2
        assert why in capsys.readouterr().err
    assert "which `axl serve` does not run; use `axl train`" in refusal(capsys, "demo_sft", "--random-weights")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "max_new_toknes=3"], "'max_new_toknes'.* did you mean 'max_new_tokens'"),
        (["--set", "server.max_qeue=3"], "'max_qeue'.* did you mean 'max_queue'"),
        (["--set", "server.max_queue"], "--set 'server.max_queue': expected path=value"),
        (["--max-queue", "0"], "Server.max_queue: expected 1 or more, got 0"),
        (["--set", "server.template.roles={}"], "Server.template.roles: expected a form for each role"),
        (["--api-key", " "], "the API key is empty"),
        (["--adapter", "french"], "--adapter french: expected MODEL=DIR, such as french=runs/french"),
        (["--adapter", "a=x", "--adapter", "a=y"], "--adapter a=y: another adapter has the name 'a', x"),
        (["--adapter", "mine=x"], "adapter 'mine': the base model has this name"),
        (["--adapter", "french=nowhere"], "adapter nowhere: there is no such directory"),
        (["--adapters-from", "."], "--adapters-from: clients load adapters with an API key alone; set AXL_API_KEY"),
    ],
)
def test_a_wrong_option_is_refused(
    run_dir: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(message, refusal(capsys, str(run_dir), "--port", "0", *arguments))


def test_an_unknown_experiment_is_refused_without_importing_jax(checkout: Path) -> None:
    status, modules = run_and_list_modules("from tools.cli import main\nstatus = main(['serve', 'dmeo'])", checkout)
    assert status == 2
    assert not modules & {"jax", "starlette", "uvicorn"}


def test_a_directory_whose_config_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.txt").write_bytes(b"\xff\xfe\x00")
    assert f"cannot read {tmp_path / 'config.txt'}" in refusal(capsys, str(tmp_path), "--port", "0")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_dir / "checkpoints" / "rl" / "2" / "params"
    path = max(folder.glob("**/d/*"), key=lambda p: p.stat().st_size)
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    try:
        assert "2 is damaged" in refusal(capsys, str(run_dir), "--port", "0")
    finally:
        path.write_bytes(good)
