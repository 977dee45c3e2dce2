"""`axl bench weights`: cost of moving weights from a trainer to workers, through the parameter server.

The result has the keys of all sections (`tools.bench.weights.sections`), each measured alone in its own process.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mesh.errors import UserError, did_you_mean
from tools.bench.harness.circumstances import PACKAGES, circumstances, machine
from tools.bench.harness.environments import Peer
from tools.bench.harness.interleave import Say, our_command
from tools.bench.weights.sections import SECTIONS

BENCHMARK = "weights"
_SECTION_TIMEOUT_S = 3600.0

type Rows = list[list[str]]


def find_sections(names: Iterable[str]) -> list[str]:
    """Return the sections of these names in the order in which they run; all sections if there are no names.

    Raises:
        UserError: a name is not that of a section.
    """
    asked = list(names)
    for name in asked:
        if name not in SECTIONS:
            raise UserError(f"benchmark {BENCHMARK} has no section {name!r}{did_you_mean(name, SECTIONS)}")
    return [name for name in SECTIONS if name in (asked or SECTIONS)]


def run(
    peers: Sequence[Peer], rounds: int, say: Say, *, sections: Sequence[str] = tuple(SECTIONS), quick: bool = False
) -> dict[str, Any]:
    """Return everything that `--json` prints.

    Args:
        peers: unused; other benchmarks have them.
        rounds: unused; each section has its own.
        say: called with one line about progress.
        sections: by name.
        quick: tiny jobs, as a smoke test.
    """
    del peers, rounds
    where = machine()  # before we load it ourselves
    parts = {name: run_section(name, say, quick=quick) for name in sections}
    result: dict[str, Any] = {"bench": BENCHMARK, "sections": list(sections), "quick": quick}
    for part in parts.values():
        result |= {key: value for key, value in part.items() if key != "error"}
    errors = {name: part["error"] for name, part in parts.items() if "error" in part}
    return result | {"errors": errors, "machine": where, **circumstances((*PACKAGES, "xxhash", "zstandard"))}


def run_section(name: str, say: Say, *, quick: bool) -> dict[str, Any]:
    """Measure one section in a process of its own; return {"error": why} if that failed."""
    say(f"{name}: {SECTIONS[name]}")
    command = our_command("tools.bench.weights.sections")
    argv = [*command.argv, name, *(["--quick"] if quick else [])]
    began = machine()["load"]
    try:
        done = subprocess.run(
            argv, env=command.environ, capture_output=True, text=True, timeout=_SECTION_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"{name}: not done within {_SECTION_TIMEOUT_S:g} s"}
    if done.returncode:
        reason = "\n".join(done.stderr.splitlines()[-8:])
        say(f"{name} failed: {reason}")
        return {"error": f"{name}: ended with status {done.returncode}\n{reason}"}
    part = json.loads(done.stdout.splitlines()[-1])
    part[name]["load"] = [began, machine()["load"]]
    return part


def succeeded(result: Mapping[str, Any], peers: Sequence[Peer]) -> bool:
    """Return whether every section was measured."""
    del peers
    return not result["errors"]


def rows(result: Mapping[str, Any]) -> Rows:
    """Return the rows of the console table: figure and value."""
    makers = {"moving": _moving, "pause": _pause, "delta": _delta, "reshard": _reshard, "fan_out": _fan_out}
    return [row for section, make in makers.items() if section in result for row in make(result)]


def _moving(result: Mapping[str, Any]) -> Rows:
    moving, found = result["moving"], []
    for way in ("sockets", "shared_memory"):
        words = way.replace("_", " ")
        for step in ("push", "pull", "pull_unverified"):
            found.append([f"{step.replace('_', ' ')}, {words}", _speed(moving[way][step])])
        ratios = f"{moving[way]['ratio_to_raw']:.2f} and {moving[way]['cpu_ratio_to_raw']:.2f}"
        found.append([f"push or pull by raw stream, the lower, wall and CPU, {words}", ratios])
    return [*found, *([way.replace("_", " "), _speed(moving[way])] for way in ("raw_stream", "memcpy"))]


def _speed(figures: Mapping[str, float]) -> str:
    return f"{figures['gbps']:.2f} GB/s, {figures['cpu_s']:.2f} CPU s"


def _pause(result: Mapping[str, Any]) -> Rows:
    found = []
    for way in ("shared_memory", "sockets"):
        one, words = result["pause"][way], way.replace("_", " ")
        found += [
            [f"pause, p50 and p99, {words}", f"{one['pause_ms_p50']:.2f} and {one['pause_ms_p99']:.2f} ms"],
            [f"transfer, p50 and p99, {words}", f"{one['transfer_s_p50']:.3f} and {one['transfer_s_p99']:.3f} s"],
            [f"age of weights, p50 and p99, {words}", f"{one['age_s_p50']:.3f} and {one['age_s_p99']:.3f} s"],
            [f"versions behind, mean, {words}", f"{one['versions_behind_mean']:.2f}"],
        ]
    return found


def _delta(result: Mapping[str, Any]) -> Rows:
    cost = result["delta_cpu_s_per_gb"]
    return [
        ["bfloat16 bytes by delta bytes", f"{result['delta_bytes_ratio']:.1f}"],
        ["delta, encode and decode", f"{cost['encode']:.2f} and {cost['decode']:.2f} CPU s / GB"],
    ]


def _reshard(result: Mapping[str, Any]) -> Rows:
    return [["bytes read by bytes needed, the worst of all pairs", f"{result['reshard_overread']:.3f}"]]


def _fan_out(result: Mapping[str, Any]) -> Rows:
    found = []
    for way in ("peer_to_peer", "direct"):
        one = result["fan_out"][way]
        text = f"{one['server_copies']:.2f} copies from the server, {one['seconds_to_last']:.2f} s to the last"
        found.append([f"{result['fan_out']['workers']} workers, {way}", text])
    return found
