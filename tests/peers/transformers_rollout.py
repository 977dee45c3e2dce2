"""transformers on the small rollout job: `generate` of its Qwen3, torch on CPU.

Log-probabilities: `generate` keeps each step's processed logits (`output_scores`), and
`compute_transition_scores` takes from their log-softmax those of the sampled tokens.

Chosen because they are fastest here (tokens per CPU second on one core, interleaved in one run):
the growing cache rather than the static one (7,070 against 6,380; torch.compile of the static one,
in another run: 4,700 against 5,910, after a minute of compiling), fused attention rather than eager
(7,070 against 6,090), and the keys and values of a prompt computed once for all its completions
rather than `num_return_sequences` (8,190 against 7,070).

Run by the benchmark with the interpreter of the peer's environment (see `environments.py`).
"""

# Imports that only the peer's environment can resolve:
# pyright: reportMissingImports=false
from __future__ import annotations

import torch
import transformers
from grpo_step.job import GrpoJob
from harness.protocol import StepServer, use_one_core
from rollout.job import Completions, serve
from transformers import DynamicCache, GenerationConfig, Qwen3ForCausalLM
from transformers_policy import PAD, build_model, parameter_count


def settings(job: GrpoJob) -> GenerationConfig:
    """Return the job in transformers' terms; without an end of sequence every completion has full length."""
    return GenerationConfig(
        do_sample=True,
        temperature=job.temperature,
        top_p=1.0,
        top_k=0,
        max_new_tokens=job.new_tokens,
        eos_token_id=None,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
    )


def generate(job: GrpoJob, model: Qwen3ForCausalLM, config: GenerationConfig, index: int) -> Completions:
    """Generate all completions of step `index` in one batch, which is fastest here."""
    torch.manual_seed(index)
    prompts = torch.tensor([list(text.encode()) for text in job.prompt_texts(index)])
    cache = DynamicCache(config=model.config)
    model.model(prompts[:, :-1], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(job.group)
    prompts = prompts.repeat_interleave(job.group, dim=0)
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        past_key_values=cache,
        generation_config=config,
    )
    logprobs = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    return Completions(output.sequences[:, job.prompt_tokens :].tolist(), logprobs.tolist())


def main() -> None:
    """Generate once per request until the runner ends the worker."""
    use_one_core()
    torch.set_num_threads(1)
    job = GrpoJob()
    model = build_model(job).eval()
    model.generation_config.eos_token_id = None  # `generate` falls back to it for fields that are None
    config = settings(job)
    server = StepServer(
        f"transformers {transformers.__version__} (torch {torch.__version__})",
        parameter_count(model),
    )
    with torch.inference_mode():
        serve(job, server, lambda index: generate(job, model, config, index))


if __name__ == "__main__":
    main()
