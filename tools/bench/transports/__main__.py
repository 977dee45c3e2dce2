"""Interleaved measurement of all ways: in each round each has the machine to itself, in processes that it starts.

python -m tools.bench.transports --json
python -m tools.bench.transports --ways wire,arrow_flight --rounds 3
"""

import argparse
import datetime
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mesh.errors import UserError, did_you_mean
from tools.bench.harness.circumstances import machine
from tools.bench.harness.environments import Environment, EnvironmentFailed, ensure_environment
from tools.bench.harness.interleave import worker_environ
from tools.bench.transports.yardsticks import ROOT, Spent, memcpy_gbps, raw_stream_gbps

FLIGHT = Environment(name="pyarrow", pythons=("3.12", "3.13"), requirements=("pyarrow==26.0.1",))
YARDSTICKS = {"memcpy": memcpy_gbps, "raw_stream": raw_stream_gbps}
SOCKETS = ("wire", "wire_fresh", "wire_2", "wire_4", "wire_digests", "wire_tls")
OURS = (*SOCKETS, "shared_memory", "shared_memory_held")
WAYS = (*YARDSTICKS, *OURS, "arrow_flight", "ray_store")
TIMEOUT_S = 300


def measure(ways: list[str], nbytes: int, rounds: int) -> dict[str, Any]:
    """Return for each way medians over rounds; `errors` has the ways that could not be measured."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        commands = _commands(ways, Path(folder), errors)
        for at in range(rounds):
            _say(f"round {at + 1} of {rounds}")
            for way in [way for way in ways if way not in errors]:
                try:
                    found[way].append(_once(way, nbytes, commands))
                    _say(f"{way}: {json.dumps(found[way][-1])}")
                except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
                    errors[way] = str(getattr(error, "stderr", None) or error)[-2000:]
                    _say(f"{way} left out: {errors[way]}")
    measured = {way: _summary(way, found, nbytes) for way in ways if found[way] and way not in errors}
    return {
        "nbytes": nbytes,
        "rounds": rounds,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": _versions(),
        "ways": measured,
        "errors": errors,
    }


def _once(way: str, nbytes: int, commands: dict[str, list[str]]) -> dict[str, float]:
    if way in YARDSTICKS:
        spent: Spent = YARDSTICKS[way](nbytes, 1)
        return {"wall_s": spent.wall_s, "cpu_s": spent.cpu_s}
    head, options = commands[way][:-1], commands[way][-1]
    done = subprocess.run(
        [*head, way, str(nbytes), options],
        cwd=ROOT,
        env=worker_environ(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    step = json.loads(done.stdout.splitlines()[-1])
    return {**step, "cpu_s": step["sender_cpu_s"] + step["receiver_cpu_s"]}


def _commands(ways: list[str], folder: Path, errors: dict[str, str]) -> dict[str, list[str]]:
    """Return the command of each way, its options last; a way that cannot run is recorded in `errors`."""
    module = [sys.executable, "-m"]
    commands = {way: [*module, "tools.bench.transports.receiving", "{}"] for way in OURS}
    commands["ray_store"] = [*module, "tools.bench.transports.ray_store", "{}"]
    if "wire_tls" in ways:
        try:
            _certificate(folder)
            commands["wire_tls"][-1] = json.dumps({"certificate": str(folder)})
        except (OSError, subprocess.SubprocessError) as error:
            errors["wire_tls"] = f"no certificate: {error}"
    if "arrow_flight" in ways:
        try:
            python = ensure_environment(FLIGHT, _say)
            script = Path(__file__).with_name("arrow_flight.py")
            commands["arrow_flight"] = [str(python), str(script), json.dumps({"batch": 1 << 24})]
        except EnvironmentFailed as error:
            errors["arrow_flight"] = str(error)
    return commands


def _certificate(folder: Path) -> None:
    command = shutil.which("openssl") or "openssl"
    names = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "2", "-subj", "/CN=bench"]
    host = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([command, "req", "-x509", *kind, *host, *names], check=True, capture_output=True, timeout=60)


def _summary(way: str, found: dict[str, list[dict[str, float]]], nbytes: int) -> dict[str, float]:
    steps = found[way]
    summary = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    summary["gbps"] = nbytes / summary["wall_s"] / 1e9
    if found.get("raw_stream"):
        pairs = list(zip(steps, found["raw_stream"], strict=False))
        for name in ("wall_s", "cpu_s"):
            summary[f"{name[:-2]}_speed_to_raw"] = statistics.median(raw[name] / step[name] for step, raw in pairs)
    return summary


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0], "pyarrow": FLIGHT.requirements[0].partition("==")[2]}
    for name in ("numpy", "ray", "xxhash"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return versions


def table(result: dict[str, Any]) -> str:
    """Format the result as Markdown."""
    head = ["way", "wall s", "CPU s, both", "CPU s, sender", "CPU s, receiver", "GB/s", "speed to raw, CPU", "first s"]
    names = ["wall_s", "cpu_s", "sender_cpu_s", "receiver_cpu_s", "gbps", "cpu_speed_to_raw", "first_wall_s"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * len(names)]
    for way, figures in result["ways"].items():
        cells = [f"{figures[name]:.2f}" if name in figures else "" for name in names]
        lines.append("| " + " | ".join([way, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure the chosen ways and print the result."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.transports", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, not as a table")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of " + ",".join(WAYS))
    parser.add_argument("--nbytes", type=int, default=10**9)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ways = options.ways.split(",")
    try:
        for way in ways:
            if way not in WAYS:
                raise UserError(f"--ways: there is no way {way!r}{did_you_mean(way, WAYS)}")
        result = measure(ways, options.nbytes, options.rounds)
    except UserError as error:
        sys.exit(str(error))
    print(json.dumps(result, indent=1) if options.json else table(result))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
