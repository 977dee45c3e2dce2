"""Attack the sandbox and measure verifiers, and print the figures as JSON: `python -m tests.attacks.sandbox`."""

import argparse
import json
import sys

from tests.attacks.sandbox.benchmark import measure


def main(arguments: list[str]) -> int:
    """Measure, print one line of JSON, and return 1 if an attack got through or a verifier is mistaken."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.sandbox", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few answers: all attacks, and rates that say little")
    quick = parser.parse_args(arguments).quick
    found = measure(checks=60, tests=10) if quick else measure()
    print(json.dumps(found | {"command": f"python -m tests.attacks.sandbox {' '.join(arguments)}"}))
    through = found["attacks_through"] + found["without_namespaces"].get("attacks_through", [])
    return 1 if through or any(found["self_test_mistakes"].values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
