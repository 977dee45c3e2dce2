"""A benchmark worker for our rollout engine: generation alone, weights set once.

Log-probabilities are those the engine puts in every rollout: of the sampled token under the
distribution it was drawn from, computed where it is drawn.
"""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

from axlearn_like.layers.base import Params, split
from mesh import make_mesh
from rl.roles.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from tools.bench.grpo.job import GrpoJob
from tools.bench.grpo.ours import experiment_config, system_version
from tools.bench.harness.protocol import StepServer
from tools.bench.rollout.job import Completions, serve, use_one_core


def build_engine(job: GrpoJob) -> tuple[RolloutEngine, int]:
    """Build an engine with a slot for every completion, holding the random policy.

    Returns:
        The engine and the number of parameters.
    """
    policy = experiment_config(job).policy

    def create(key: jax.Array) -> Params:
        return split(policy.build(rngs=nnx.Rngs(key)))[1]

    params = jax.jit(create)(jax.random.key(job.seed))
    engine = RolloutEngine.Config(
        model=policy,
        stop_tokens=(),
        max_prompt=job.prompt_tokens,
        max_new=job.new_tokens,
        max_num_seqs=job.rollouts,
        keep_completions=False,  # no rollout continues another
    ).build()
    engine.set_weights(params, 0)
    return engine, sum(leaf.size for leaf in jax.tree.leaves(params))


def generate(job: GrpoJob, engine: RolloutEngine, index: int) -> Completions:
    """Generate all completions of step `index`."""
    requests = []
    for row, text in enumerate(job.prompt_texts(index)):
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        prompt = Prompt(index * job.prompts + row, "letters", tokens)
        requests.append(Request(prompt, samples=job.group, seed=job.seed))
    rollouts = engine.generate(requests)
    return Completions(
        [rollout.tokens.tolist() for rollout in rollouts],
        [rollout.logprobs.tolist() for rollout in rollouts],
    )


def main() -> None:
    """Generate once per request until the runner ends the worker."""
    use_one_core()
    job = GrpoJob()
    with jax.set_mesh(make_mesh()):
        engine, parameters = build_engine(job)
        server = StepServer(system_version(), parameters)
        serve(job, server, lambda index: generate(job, engine, index))


if __name__ == "__main__":
    main()
