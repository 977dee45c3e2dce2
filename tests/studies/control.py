"""CPU time of one controller for a rollout, by work items in flight, workers and prompt pool.

Leases, heartbeats, reports, batches and updates go through the real controller; a rollout has two tokens.

    python -m tests.studies.control 32,64 1024,64 100000,10000
"""

import sys
import time
from collections import deque
from typing import Any

import numpy as np

from axlearn_like.tokenizers.bytes import ByteTokenizer
from rl.controller.controller import Controller
from rl.controller.prompt_pool import PromptPool
from rl.protocol.messages import Group, Lease
from rl.tasks.mixture import TaskMixture
from tests.rl.tasks.numbers import Numbers
from tests.rl.tiny import make_group

SAMPLES = 8  # rollouts of a work item
LEAST = 4096  # rollouts that are timed, at least


def microseconds_per_rollout(in_flight: int, workers: int, pool: bool = False) -> float:
    """Return the CPU time of the process, the making of prompts included, of rollouts excluded."""
    items = in_flight // 2  # of a step: with staleness 1, two are in flight
    steps = max(2, LEAST // (items * SAMPLES))
    tasks = TaskMixture.Config(families=(Numbers.Config(label="numbers"),), heldout_every=10**9)
    more: dict[str, Any] = {"pool": PromptPool.Config(explore=0.3, size=8192)} if pool else {}
    sizes = {"prompts_per_step": items, "samples_per_prompt": SAMPLES, "groups_per_lease": 1, "staleness": 1}
    cfg = Controller.Config(tasks=tasks, tokenizer=ByteTokenizer.Config(), num_steps=steps, **sizes, **more)
    controller = cfg.build(clock=lambda: 0.0)
    names, rng, making = [f"worker-{n}" for n in range(workers)], np.random.default_rng(0), 0.0
    began = time.process_time()
    for name in names:
        controller.join(name)
    controller.begin(0, first_version=0)
    leases: deque[Lease] = deque()
    for step in range(steps):
        while (lease := controller.lease(names[len(leases) % workers])) is not None:
            controller.heard(names[len(leases) % workers])
            leases.append(lease)
        while leases and leases[0].step == step:
            lease, started = leases.popleft(), time.process_time()
            groups = scored(lease, rng)
            making += time.process_time() - started
            controller.generated(lease.id)
            controller.renew(lease.id)
            assert controller.submit(lease.id, groups)
        assert controller.headers(step) is not None and controller.plan_after(step) is not None
        controller.consumed(step)
        controller.published(step + 1)
    taken = time.process_time() - began - making
    controller.stop()
    return taken / (steps * items * SAMPLES) * 1e6


def scored(lease: Lease, rng: np.random.Generator) -> tuple[Group, ...]:
    rewards = (rng.random(SAMPLES) < 0.5).astype(float).tolist()
    return tuple(make_group(p, [[1, 2]] * SAMPLES, rewards, version=lease.version) for p in lease.prompts)


if __name__ == "__main__":
    for size in sys.argv[1:]:
        in_flight, workers = (int(n) for n in size.split(","))
        for pool in (False, True):
            taken = microseconds_per_rollout(in_flight, workers, pool)
            print(
                f"{in_flight} work items in flight, {workers} workers, pool {pool}: {taken:.0f} us a rollout",
                flush=True,
            )
