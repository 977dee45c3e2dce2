"""`axl bench verify`: attacks on the sandbox of this machine, the seconds to reap a hang, and verifiers' self-tests."""

import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from rl.verification.sandbox.attacks import ATTACKS
from rl.verification.sandbox.sandbox import Sandbox, SandboxError
from rl.verification.verifiers.self_test import CASES, VERIFIERS, self_test
from tools.bench.harness.circumstances import circumstances, machine

_SECRET = "AXL_BENCH_SECRET"
_DEADLINE_S = 1.0


def measure() -> dict[str, Any]:
    """Return what came of each attack, with namespaces and with Landlock, and the mistakes of the self-tests."""
    attacks = {**_attack("auto"), "without_namespaces": _attack("landlock")}
    mistakes = {name: len(self_test(VERIFIERS[name], CASES[name]).mistakes) for name in sorted(VERIFIERS)}
    return {"bench": "verify", **attacks, "self_test_mistakes": mistakes, "machine": machine(), **circumstances()}


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
