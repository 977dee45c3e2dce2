"""Run all attacks here and print the end of each: `python -m tests.attacks.sandbox`."""

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from rl.verification.sandbox.sandbox import Sandbox, SandboxError
from tests.attacks.sandbox import ATTACKS

_SECRET = "AXL_ATTACKED_SECRET"


def ends(backend: Any) -> dict[str, str]:
    """Return the end of each attack by one kind of walls; of all the same where the machine has none."""
    found: dict[str, str] = {}
    os.environ[_SECRET] = "secret"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        port = listener.getsockname()[1]
        places = {"secret": str(secret), "variable": _SECRET, "port": port, "pid": os.getpid()}
        try:
            with Sandbox.Config(deadline_s=1.0, backend=backend).build() as sandbox:
                for name, attack in ATTACKS.items():
                    outcome, through = attack.run(sandbox, places)
                    why = outcome.error.partition(":")[0] if outcome.ended in ("done", "crash") else outcome.ended
                    found[name] = "THROUGH" if through else why
        except SandboxError as error:
            return dict.fromkeys(ATTACKS, f"refused: {error}")
    return found


if __name__ == "__main__":
    by_namespaces, by_landlock = ends("namespaces"), ends("landlock")
    for one in ATTACKS:
        print(f"| {one} | {by_namespaces[one]} | {by_landlock[one]} |")
    held = sum("THROUGH" not in (by_namespaces[one], by_landlock[one]) for one in ATTACKS)
    print(f"{held} of {len(ATTACKS)} attacks held")
    raise SystemExit(held < len(ATTACKS))
