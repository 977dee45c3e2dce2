"""Measure one section in this process; the last line of standard output is its result in JSON.

python -m tools.bench.rollout.sections long_tail [--quick]
"""

import json
import sys
from importlib import import_module

from tools.bench.rollout.job import use_one_core


def main(section: str, *, quick: bool) -> None:
    """Measure a section on one core, as the workers of the comparison with peers do."""
    use_one_core()  # before jax counts the cores

    from mesh import enable_compilation_cache
    from tools.bench.rollout.sections.bed import Bed

    enable_compilation_cache()  # nothing here measures a cold start
    result = import_module(f"tools.bench.rollout.sections.{section}").measure(Bed(quick=quick))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], quick="--quick" in sys.argv[2:])
