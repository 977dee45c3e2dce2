"""CPU time of one controller for a rollout, by work items in flight, workers and prompt pool.

python -m tests.studies.control 32,64 1024,64 100000,10000
"""

import sys

from tests.benches.simulate.control import microseconds_per_rollout

if __name__ == "__main__":
    for size in sys.argv[1:]:
        in_flight, workers = (int(n) for n in size.split(","))
        for pool in (False, True):
            taken = microseconds_per_rollout(in_flight, workers, pool)
            print(
                f"{in_flight} work items in flight, {workers} workers, pool {pool}: {taken:.0f} us a rollout",
                flush=True,
            )
