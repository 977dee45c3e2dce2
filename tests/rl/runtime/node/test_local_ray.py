"""Ray with two raylets: one is killed, the actors of the other live on, and another raylet takes its place."""

import json
import subprocess
import sys
from pathlib import Path

HELD = """
import json, os, signal, sys, threading, time
import rl.runtime.ray
from pathlib import Path
from rl.runtime.node.local_ray import LocalRay

held, seen = LocalRay(Path(sys.argv[1]), 2), []
first = held.told()

def replaced(number, before, after):
    seen.append([number, before, after])
    os.kill(first["gcs_server"], signal.SIGKILL)

told = []
os.kill(list(first["raylets"].values())[1], signal.SIGKILL)
lost = held.hold(lambda: told.append(held.told()), replaced)
held.end(graceful=False)
sys.stdout.write(json.dumps({"first": first, "told": told, "seen": seen, "lost": lost}) + "\\n")
sys.stdout.flush()
os._exit(0)
"""


def test_a_raylet_is_replaced_beside_the_other_and_without_gcs_server_it_is_over(checkout: Path) -> None:
    from rl.runtime.ray.session import session_folder

    session_folder().mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", HELD, str(session_folder())]
    said = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True, timeout=300).stdout
    found = json.loads(said.splitlines()[-1])
    one, other = found["first"]["raylets"].values()
    alone, again = (list(told["raylets"].values()) for told in found["told"])
    [[number, before, after]] = found["seen"]
    assert alone == [one] and again == [one, after] and (number, before) == (1, other)
    assert found["first"]["sides"] == 2 and found["lost"] == f"gcs_server (pid {found['first']['gcs_server']})"
