"""Kill the roles of a run and print how it recovered, as JSON: `python -m tests.chaos.recovery --kills 1`."""

import argparse
import json
import sys
from pathlib import Path

from mesh.programs.compilation import enable_compilation_cache
from tests.chaos.recovery import benchmark


def main(arguments: list[str]) -> int:
    """Measure, print one line of JSON, and return 1 if something was lost, duplicated or changed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.recovery", description=benchmark.__doc__)
    parser.add_argument("--kills", type=int, default=20, help="kills of each role")
    parser.add_argument("--roles", default="", help="comma-separated roles to kill; default: all, and the driver")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the kills and of their moments")
    parser.add_argument("--minutes", type=float, help="start no further kill after this time")
    parser.add_argument("--keep", type=Path, help="a new directory to keep the runs in")
    given = parser.parse_args(arguments)
    roles = benchmark.find_roles(name for name in given.roles.split(",") if name)
    enable_compilation_cache()
    result = benchmark.run(given.kills, roles, print, seed=given.seed, minutes=given.minutes, keep=given.keep)
    print(json.dumps(result | {"command": f"python -m tests.chaos.recovery {' '.join(arguments)}"}))
    return 0 if benchmark.succeeded(result) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
