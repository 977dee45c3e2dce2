"""A benchmark worker for our rollout engine: generation alone, weights set once.

Log-probabilities are those the engine puts in every rollout: of the sampled token under the
distribution it was drawn from, computed where it is drawn.
"""

import jax
import numpy as np
from flax import nnx

from axlearn_like.layers.base import split
from mesh import make_mesh
from rl.protocol.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from tools.bench.grpo_step.job import GrpoJob
from tools.bench.grpo_step.ours import experiment_config
from tools.bench.harness.circumstances import system_version
from tools.bench.harness.protocol import StepServer, use_one_core
from tools.bench.rollout.job import Completions, serve


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
    policy = experiment_config(job).policy
    cfg = RolloutEngine.Config(
        model=policy,
        stop_tokens=(),  # only the limit ends a completion
        max_num_seqs=job.rollouts,
        max_prompt_tokens=job.prompt_tokens,
        max_new_tokens=job.new_tokens,
        keep_completions=False,  # no rollout continues another
    )
    create = jax.jit(lambda key: split(policy.build(rngs=nnx.Rngs(key)))[1])
    with jax.set_mesh(make_mesh()):
        engine = cfg.build()
        engine.set_weights(create(jax.random.key(0)), 0)
        server = StepServer(system_version(), sum(leaf.size for leaf in jax.tree.leaves(engine.runner.weights_like)))
        serve(job, server, lambda index: generate(job, engine, index))


if __name__ == "__main__":
    main()
