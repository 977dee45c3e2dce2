"""Measure the supervised step beside plain JAX and MaxText, and print JSON: `python -m tests.studies.train_step`."""

import argparse
import json
import sys

from tests.studies.train_step import benchmark
from tools.bench.harness.environments import find_peers


def main(arguments: list[str]) -> int:
    """Measure, print one line of JSON, and return 1 if a system could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.train_step", description=benchmark.__doc__)
    parser.add_argument("--peers", nargs="*", default=(), help="peers to take turns with: maxtext")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--quick", action="store_true", help="tiny jobs: shows that all runs, measures nothing")
    given = parser.parse_args(arguments)
    result = benchmark.run(find_peers(given.peers, benchmark.BENCHMARK), given.steps, print, quick=given.quick)
    print(json.dumps(result | {"command": f"python -m tests.studies.train_step {' '.join(arguments)}"}))
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
