"""Verifiers: checks of mathematics and tests of code a second, attacks survived, and the seconds to reap a hang.

All of it through `Verifier` with one process a core, as in a run; the processes are warm (started, with some checks
done). Answers to one reference share what was read of it, and answers of the same text what was read of them; in
`distinct_math` no two texts are equal. Each test of code has two boxes of its own.

On a machine that does other work too, a rate says little of the verifier: `..._per_cpu_second` counts what all of its
processes have used, so that twice as many are what two idle cores give.
"""

import contextlib
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mesh.errors import UserError
from rl.verification.sandbox.attacks import ATTACKS
from rl.verification.sandbox.sandbox import Sandbox, SandboxError
from rl.verification.scorers import Scorer
from rl.verification.service import Verifier
from rl.verification.verifiers.code import CodeVerifier
from rl.verification.verifiers.exact.expression import evaluate
from rl.verification.verifiers.exact.reading import read_answer
from rl.verification.verifiers.math import MathVerifier
from rl.verification.verifiers.self_test import CASES, VERIFIERS, Case, Rows, self_test
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.verify.distinct import distinct

__all__ = ["first_verdicts", "measure"]

_SECRET = "AXL_BENCH_SECRET"
_DEADLINE_S = 1.0


def measure(checks: int = 4000, tests: int = 600, processes: int = 2) -> dict[str, Any]:
    """Return the figures of all parts.

    Args:
        checks: answers of mathematics.
        tests: answers of code.
        processes: number of processes of the verifier.
    """
    where = machine()  # load without ours
    rates = {
        "math": _rate(CASES["math"], MathVerifier.Config, checks, processes),
        "distinct_math": _rate(distinct(checks), MathVerifier.Config, checks, processes),
        "math_of_numbers": _rate(_numbers(), MathVerifier.Config, checks, processes),
        "python_tests": _rate(CASES["code"][:1], CodeVerifier.Config, tests, processes),
    }
    attacks = {**_attack("auto"), "without_namespaces": _attack("landlock")}
    mistakes = {name: len(self_test(VERIFIERS[name], CASES[name]).mistakes) for name in sorted(VERIFIERS)}
    return {
        "bench": "verify",
        **{f"{name}_per_second": rate for name, (rate, _) in rates.items()},
        **{f"{name}_per_cpu_second": rate for name, (_, rate) in rates.items()},
        **first_verdicts(),
        "processes": processes,
        **attacks,
        "self_test_mistakes": mistakes,
        "machine": where,
        **circumstances(),
    }


def first_verdicts(runs: int = 5) -> dict[str, float]:
    """Return verdicts on mathematics a CPU-second of one process that remembers nothing: median and worst of runs."""
    cases = [*CASES["math"], *distinct(800)]
    verifier = MathVerifier(MathVerifier.Config(mixture=Rows.Config(rows=tuple(case.row for case in cases))))
    rates = []
    for _ in range(runs):
        read_answer.cache_clear()
        evaluate.cache_clear()
        began, count = time.process_time(), 0
        for case in cases:
            for answer in (*case.right, *case.wrong):
                verifier.explain(answer, case.row["answer"])
                count += 1
        rates.append(count / (time.process_time() - began))
    return {"first_math_per_cpu_second": round(statistics.median(rates)), "first_math_worst": round(min(rates))}


def _numbers() -> Sequence[Case]:
    return [Case({"answer": str(n)}, [f"{n}"], [f"{n + 1}"]) for n in range(0, 10_000, 13)]


def _rate(cases: Sequence[Case], config: Any, count: int, processes: int) -> tuple[float, float]:
    """Score right and wrong answers in turn; return answers a second, and a second of CPU time.

    None may fail, or be scored wrongly.
    """
    rows = Rows.Config(rows=tuple(case.row for case in cases))
    every = [(n, one, 1.0) for n, case in enumerate(cases) for one in case.right]
    every += [(n, one, 0.0) for n, case in enumerate(cases) for one in case.wrong]
    listed = [every[i % len(every)] for i in range(count)]
    scorer: Scorer.Config = config(mixture=rows)
    with Verifier.Config(scorer=scorer, processes=processes).build() as verifier:
        warm = listed[: 20 * processes]
        verifier.score([n for n, _, _ in warm], [one for _, one, _ in warm])
        began, used = time.perf_counter(), cpu_seconds()
        scores = verifier.score([n for n, _, _ in listed], [one for _, one, _ in listed])
        seconds, used = time.perf_counter() - began, cpu_seconds() - used
    for score, (row, answer, expected) in zip(scores, listed, strict=True):
        if score.status != "ok" or score.reward != expected:
            raise UserError(f"row {row}, answer {answer!r}: {score}, expected {expected}")
    return round(count / seconds, 1), round(count / max(used, 0.01), 1)


def cpu_seconds() -> float:
    """Return the CPU time of this process and all below it, with those that have ended and were waited for."""
    parents, used = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                used[int(entry.name)] = sum(map(int, fields[11:15]))
    found = [os.getpid()]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return sum(used[pid] for pid in found) / os.sysconf("SC_CLK_TCK")


def _attack(backend: Any) -> dict[str, Any]:
    """Run all attacks in one sandbox; the reap is the time from a deadline until the box and all below it are gone.

    "refused" says why there is none by Landlock.
    """
    try:
        results, isolation = _run_attacks(backend)
    except SandboxError as error:
        if backend != "landlock":
            raise
        return {"refused": str(error)}
    reaps = [results[name]["seconds"] - _DEADLINE_S for name, attack in ATTACKS.items() if attack.hangs]
    through = [name for name, result in results.items() if result["through"]]
    return {
        "isolation": isolation,
        "attacks": len(ATTACKS),
        "attacks_survived": len(ATTACKS) - len(through),
        "attacks_through": through,
        "attack_results": results,
        "reap_seconds_max": round(max(reaps), 3),
        "reap_seconds_mean": round(sum(reaps) / len(reaps), 3),
    }


def _run_attacks(backend: Any) -> tuple[dict[str, dict[str, Any]], str]:
    """Return for each attack its end, the error, the seconds and whether it got through; and the kind of isolation."""
    results: dict[str, dict[str, Any]] = {}
    os.environ[_SECRET] = "secret"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        port = listener.getsockname()[1]
        places = {"secret": str(secret), "variable": _SECRET, "port": port, "pid": os.getpid()}
        with Sandbox.Config(deadline_s=_DEADLINE_S, backend=backend).build() as sandbox:
            isolation = sandbox.isolation
            for name, attack in ATTACKS.items():
                began = time.perf_counter()
                outcome, through = attack.run(sandbox, places)
                seconds = round(time.perf_counter() - began, 3)
                error = outcome.error.replace(str(secret), "SECRET")[:120]
                results[name] = {"outcome": outcome.ended, "error": error, "seconds": seconds, "through": through}
    del os.environ[_SECRET]
    return results, isolation
