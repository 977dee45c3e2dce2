"""Measure one section in this process; the last line of standard output is its result in JSON.

python -m tools.bench.weights.sections reshard [--quick]
"""

import json
import sys
from importlib import import_module


def main(section: str, *, quick: bool) -> None:
    """Measure a section and print its result."""
    result = import_module(f"tools.bench.weights.sections.{section}").measure(quick=quick)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], quick="--quick" in sys.argv[2:])
