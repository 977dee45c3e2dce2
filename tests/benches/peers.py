"""Other projects beside ours: workers, in virtual environments that are made on demand and kept in the user's cache.

A peer is never vendored: pip installs pinned versions by name, from wherever the user's pip is
configured to look, into an environment that only the benchmark uses.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mesh.errors import UserError, did_you_mean
from tools.bench.harness.processes import ROOT, Command, worker_environ

_PROBE = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
_UV = "uv==0.13.8"
WORKERS = ROOT / "tests" / "peers"
_COMPLETE = "complete.json"  # written last: an environment without it is incomplete, and is made again


class EnvironmentFailed(RuntimeError):
    """A failure to make a peer's environment; the message says why and what to do."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment; several peers may share one.

    Attributes:
        name: name of its folder.
        pythons: interpreter versions that it works with, the preferred first.
        requirements: what pip installs, `name==version`.
        lowest: whether the requirements' own requirements come in the lowest versions that they allow, which pip cannot
            do; then pip installs uv, and uv the rest.
    """

    name: str
    pythons: tuple[str, ...]
    requirements: tuple[str, ...]
    lowest: bool = False


@dataclass(frozen=True)
class Peer:
    """A system to compare with: its environment, worker scripts and settings.

    Attributes:
        name: as on the command line.
        environment: where it runs.
        scripts: for each benchmark it takes part in, the worker script, a file in `tests/peers`.
        environ: environment variables that it needs for its best figures.
    """

    name: str
    environment: Environment
    scripts: Mapping[str, str]
    environ: Mapping[str, str] = field(default_factory=dict)


def peers_of(benchmark: str) -> dict[str, Peer]:
    """Return the peers that take part in a benchmark, by name."""
    found = tomllib.loads((WORKERS / "peers.toml").read_text())
    environments = {
        name: Environment(name, tuple(one["pythons"]), tuple(one["requirements"]), one.get("lowest", False))
        for name, one in found["environments"].items()
    }
    return {
        name: Peer(name, environments[one["environment"]], one["scripts"], one.get("environ", {}))
        for name, one in found["peers"].items()
        if benchmark in one["scripts"]
    }


def find_peers(names: Iterable[str], benchmark: str) -> list[Peer]:
    """Return the peers of these names, in order, each once.

    Raises:
        UserError: a name is not that of a peer of this benchmark.
    """
    known = peers_of(benchmark)
    asked = list(dict.fromkeys(names))
    for name in asked:
        if name not in known:
            raise UserError(f"benchmark {benchmark} has no peer {name!r}{did_you_mean(name, known)}")
    return [known[name] for name in asked]


def peer_commands(
    benchmark: str, peers: Iterable[Peer], say: Callable[[str], None], *arguments: str
) -> tuple[dict[str, Command], dict[str, str]]:
    """Return the commands of the peers' workers, and why some have none; makes environments that are not there.

    Args:
        benchmark: by which each peer has a worker.
        peers: peers to run.
        say: called with one line about progress.
        arguments: arguments of all workers.
    """
    commands, errors = {}, {}
    for peer in peers:
        try:
            python = ensure_environment(peer.environment, say)
        except EnvironmentFailed as error:
            say(f"left out: {error}")
            errors[peer.name] = str(error)
            continue
        # Only this folder: the project's own packages must not shadow the peer's.
        environ = worker_environ(PYTHONPATH=str(ROOT / "tools" / "bench"), **peer.environ)
        commands[peer.name] = Command((str(python), str(WORKERS / peer.scripts[benchmark]), *arguments), environ)
    return commands, errors


def cache_folder() -> Path:
    """Return the folder of the environments: `axlearn-like/peers` under the XDG cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "axlearn-like" / "peers"


def find_interpreter(versions: Iterable[str]) -> tuple[Path, str]:
    """Find an interpreter that runs and can make virtual environments.

    Candidates are this interpreter, those on the path and those in pyenv's folder of versions. A name that exists
    proves nothing (pyenv's shims refuse to run a version that is not selected; distributions ship
    interpreters without ensurepip), so each candidate is run to get its version.

    Args:
        versions: `major.minor`, the preferred first.

    Returns:
        The interpreter and its version.

    Raises:
        EnvironmentFailed: there is none.
    """
    wanted = list(versions)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for version in wanted:
        candidates = [Path(getattr(sys, "_base_executable", sys.executable))]
        candidates += [Path(folder) / f"python{version}" for folder in os.environ.get("PATH", "").split(os.pathsep)]
        candidates += sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
        for candidate in candidates:
            if candidate.is_file() and _version_of(candidate) == version:
                return candidate, version
    raise EnvironmentFailed(
        f"needs Python {' or '.join(wanted)} with the venv and ensurepip modules; found none on "
        f"the path nor in {pyenv}. Install one (for example `pyenv install {wanted[0]}`)"
    )


def ensure_environment(environment: Environment, say: Callable[[str], None], cache: Path | None = None) -> Path:
    """Make the environment unless it exists and is complete.

    Args:
        environment: which.
        say: called with one line about each step that takes long, before it begins.
        cache: folder of environments; `cache_folder()` where None.

    Returns:
        The environment's interpreter.

    Raises:
        EnvironmentFailed: no interpreter, or pip failed.
    """
    root = cache or cache_folder()
    folder = root / environment.name
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = folder.with_suffix(".lock").open("w")
    except OSError as error:
        raise EnvironmentFailed(f"{environment.name}: cannot write to {root}: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # concurrent benchmarks make it only once
        if not _is_complete(environment, folder):
            try:
                _make(environment, folder, say)
            except EnvironmentFailed as error:
                raise EnvironmentFailed(f"{environment.name}: {error}") from error
    return folder / "bin" / "python"


def _version_of(interpreter: Path) -> str | None:
    try:
        probe = subprocess.run([str(interpreter), "-c", _PROBE], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return probe.stdout.strip() if probe.returncode == 0 else None


def _is_complete(environment: Environment, folder: Path) -> bool:
    try:
        made = json.loads((folder / _COMPLETE).read_text())
    except (OSError, ValueError):
        return False
    runs = (folder / "bin" / "python").exists()  # False where the base interpreter was removed
    return runs and made.get("requirements") == list(environment.requirements)


def _make(environment: Environment, folder: Path, say: Callable[[str], None]) -> None:
    interpreter, version = find_interpreter(environment.pythons)
    shutil.rmtree(folder, ignore_errors=True)
    say(f"{environment.name}: installing {', '.join(environment.requirements)} for Python {version} in {folder}")
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--no-input"]
    commands = [[str(interpreter), "-m", "venv", str(folder)]]
    if environment.lowest:
        uv = [python, "-m", "uv", "pip", "install", "--python", python, "--resolution=lowest"]
        commands += [[*pip, _UV], [*uv, *environment.requirements]]
    elif environment.requirements:
        commands.append([*pip, *environment.requirements])
    # The caller's own environment must not leak into the new one.
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        for command in commands:
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environ, check=False).returncode:
                lines = log.read_text(errors="replace").splitlines()
                reason = "\n".join([line for line in lines if line.startswith("ERROR")][-3:] or lines[-3:])
                raise EnvironmentFailed(f"`{' '.join(command[1:4])}` failed:\n{reason}\n(log: {log})")
    facts = {"requirements": list(environment.requirements), "python": version}
    (folder / _COMPLETE).write_text(json.dumps(facts) + "\n")
