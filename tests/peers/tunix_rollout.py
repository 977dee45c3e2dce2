"""google-tunix on the small rollout job: its vanilla rollout engine, `VanillaRollout`.

Log-probabilities are the engine's own (`return_logprobs`): its sampler records, inside the compiled
decoding loop, the log-softmax of the sampled token under the tempered distribution it drew from.
Each prompt is passed once for each of its completions, as tunix's learners do: the
engine has no notion of several completions of one prompt.

Run by the benchmark with the interpreter of the peer's environment (see `environments.py`).
"""

# Imports that only the peer's environment can resolve:
# pyright: reportMissingImports=false
from __future__ import annotations

from grpo_step.job import GrpoJob
from harness.protocol import StepServer, use_one_core
from rollout.job import Completions, serve
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix_policy import (
    AsciiTokenizer,
    build_model,
    one_device_mesh,
    parameter_count,
    system_version,
)


class RolloutTokenizer(AsciiTokenizer):
    """A tokenizer whose padding id cannot be sampled: the sampler masks sampled padding ids in attention."""

    def pad_id(self) -> int:
        """An id outside the vocabulary; no prompt of this job needs padding."""
        return 998


def generate(job: GrpoJob, engine: VanillaRollout, index: int) -> Completions:
    """Generate all completions of step `index` in one batch, which is fastest here."""
    # One character less: the sampler puts a beginning-of-sequence token in front.
    prompts = job.prompt_texts(index, job.prompt_tokens - 1)
    output = engine.generate(
        [prompt for prompt in prompts for _ in range(job.group)],
        RolloutConfig(
            max_tokens_to_generate=job.new_tokens,
            max_prompt_length=job.prompt_tokens,
            temperature=job.temperature,
            top_p=1.0,
            top_k=None,
            seed=index,
            return_logprobs=True,
        ),
    )
    return Completions([row.tolist() for row in output.tokens], output.logprobs)


def main() -> None:
    """Generate once per request until the runner ends the worker."""
    use_one_core()
    job = GrpoJob()
    with one_device_mesh():
        model = build_model(job)
        cache = CacheConfig(
            cache_size=job.prompt_tokens + job.new_tokens,
            num_layers=job.layers,
            num_kv_heads=job.kv_heads,
            head_dim=job.head_dim,
        )
        engine = VanillaRollout(model, RolloutTokenizer(), cache)
        server = StepServer(system_version(), parameter_count(model))
        serve(job, server, lambda index: generate(job, engine, index))


if __name__ == "__main__":
    main()
