"""google-tunix on the small GRPO job: its own GRPOLearner, vanilla rollout engine, one process.

Run by the benchmark with the interpreter of the peer's environment (see `environments.py`).
"""

# Imports that only the peer's environment can resolve:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from grpo_step.job import GrpoJob, digit_share
from harness.protocol import StepServer
from tunix.rl import rl_cluster as rlc
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix_policy import AsciiTokenizer, build_model, one_device_mesh, parameter_count, system_version

ENDLESS = 10**9  # steps; the runner ends the worker before


def build_cluster(job: GrpoJob, model: nnx.Module, mesh: jax.sharding.Mesh) -> rlc.RLCluster:
    """Build actor and sampler on one mesh; the whole batch is generated at once, which is fastest here."""
    roles = (rlc.Role.ACTOR, rlc.Role.REFERENCE, rlc.Role.ROLLOUT)
    return rlc.RLCluster(
        actor=model,
        reference=None,  # beta is 0
        tokenizer=AsciiTokenizer(),
        cluster_config=rlc.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rlc.RLTrainingConfig(
                actor_optimizer=optax.adamw(job.learning_rate),
                eval_every_n_steps=ENDLESS,
                max_steps=ENDLESS,
                mini_batch_size=job.prompts,
                train_micro_batch_size=job.prompts,
                rollout_micro_batch_size=job.prompts,
                compute_logps_micro_batch_size=job.prompts,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=job.new_tokens,
                max_prompt_length=job.prompt_tokens,
                kv_cache_size=job.prompt_tokens + job.new_tokens + 8,
                temperature=job.temperature,
                top_p=1.0,
                top_k=None,
            ),
        ),
    )


def time_generation(cluster: rlc.RLCluster, server: StepServer) -> dict[str, int]:
    """Wrap the cluster's `generate` with a clock; the returned dict holds the tokens sampled."""
    generate = cluster.generate
    sampled = {"tokens": 0}

    def timed(*args: Any, **kwargs: Any) -> Any:
        with server.generation():
            output = generate(*args, **kwargs)
            jax.block_until_ready(output.tokens)
        sampled["tokens"] = sum(len(tokens) for tokens in output.tokens)
        return output

    cluster.generate = timed
    return sampled


def batches(job: GrpoJob, cluster: rlc.RLCluster, server: StepServer) -> Iterator[dict[str, Any]]:
    """Yield the prompts of one step after another.

    The learner requests a batch when the previous step is over (rollouts are synchronous where actor
    and sampler share a mesh), so this is where a step ends and the worker waits.
    """
    index = 0
    while True:
        # One character less: the sampler puts a beginning-of-sequence token in front.
        yield {"prompts": np.array(job.prompt_texts(index, job.prompt_tokens - 1))}
        trainer = cluster.actor_trainer
        jax.block_until_ready([nnx.state(trainer.model), nnx.state(trainer.optimizer)])
        if not server.step_done():
            return
        index += 1


def main() -> None:
    """Train one step per request until the runner ends the worker."""
    job = GrpoJob()
    mesh = one_device_mesh()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mesh)
        model = build_model(job)
        server = StepServer(system_version(), parameter_count(model))
        cluster = build_cluster(job, model, mesh)
        sampled = time_generation(cluster, server)

        def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
            rewards = [digit_share(completion) for completion in completions]
            server.record(sampled["tokens"], float(np.mean(rewards)))
            return rewards

        learner = GRPOLearner(
            rl_cluster=cluster,
            reward_fns=reward,
            algo_config=GRPOConfig(num_generations=job.group, num_iterations=1, beta=0.0, epsilon=job.clip),
        )
        server.begin()
        learner.train(batches(job, cluster, server))


if __name__ == "__main__":
    main()
