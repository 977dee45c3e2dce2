"""Section `control`: CPU time of one controller for a rollout, by work items in flight, workers and prompt pool.

Leases, heartbeats, reports, batches and updates go through the real controller; a rollout has two tokens. Problems
repeat 64 texts, so that the time of their source is left out.
"""

import time
from collections import deque
from typing import Any

import numpy as np

from axlearn_like.tokenizers.bytes import ByteTokenizer
from rl.controller.controller import Controller
from rl.controller.prompt_pool import PromptPool
from rl.protocol.messages import Group, Lease, Rollout, Score
from rl.runtime.simulated.services import RepeatedMixture
from rl.tasks.family import TaskFamily

SAMPLES = 8  # rollouts of a work item
LEAST = 4096  # rollouts that are timed, at least


def microseconds_per_rollout(in_flight: int, workers: int, pool: bool = False) -> float:
    """Return the CPU time of the process, the making of prompts included, of rollouts excluded."""
    items = in_flight // 2  # work items of a step: with staleness 1, two steps are in flight
    steps = max(2, LEAST // (items * SAMPLES))
    tasks = RepeatedMixture.Config(families=(TaskFamily.Config(name="chain_sum"),))
    more: dict[str, Any] = {"pool": PromptPool.Config(explore=0.3, size=8192)} if pool else {}
    sizes = {"prompts_per_step": items, "samples_per_prompt": SAMPLES, "groups_per_lease": 1, "staleness": 1}
    cfg = Controller.Config(tasks=tasks, tokenizer=ByteTokenizer.Config(), num_steps=steps, **sizes, **more)
    controller = cfg.build(clock=lambda: 0.0)
    tasks.build().train(0)  # imports
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
            if not controller.submit(lease.id, groups):
                raise RuntimeError(f"lease {lease.id} is void")
        if controller.headers(step) is None or controller.plan_after(step) is None:
            raise RuntimeError(f"step {step} is not complete")
        controller.consumed(step)
        controller.published(step + 1)
    taken = time.process_time() - began - making
    controller.stop()
    return taken / (steps * items * SAMPLES) * 1e6


def scored(lease: Lease, rng: np.random.Generator) -> tuple[Group, ...]:
    """Return scored groups of rollouts with two tokens each, half of them right."""
    groups = []
    for prompt in lease.prompts:
        rewards = (rng.random(SAMPLES) < 0.5).astype(float).tolist()
        rollouts = [_rollout(prompt.id, sample, lease.version) for sample in range(SAMPLES)]
        groups.append(Group(prompt, tuple(rollouts), tuple(map(Score, rewards))))
    return tuple(groups)


def _rollout(prompt: int, sample: int, version: int) -> Rollout:
    versions, mask = np.full(2, version, np.int32), np.ones(2, bool)
    return Rollout(prompt, sample, np.array([1, 2], np.int32), np.zeros(2, np.float32), versions, mask, "stop")
