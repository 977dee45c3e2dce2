"""Cost of rounding for a trained policy: pass@1 of the demo by engines that hold it as fewer bits, or as factors.

    python -m tests.studies.quantised_policies runs/demo/warm_start

The argument is a run of `axl train demo_sft` or `axl rl demo`, or a directory of its checkpoints. Every engine draws 16
samples of the same held-out problems, by the same keys. `shift` is the mean, over the drawn tokens, of the magnitude
of the log-probability under the engine's policy minus that under the trainer's: what importance ratios correct.
"""

import math
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.wrappers.low_rank.factorised import FactorisedWeights
from axlearn_like.layers.wrappers.quantised import StoredWeights
from axlearn_like.tokenizers.protocol import answer_text
from experiments.modifiers import whitened_rollouts
from experiments.registry import get
from mesh import make_mesh
from rl.protocol.messages import Group, Prompt
from rl.rollout.request import Request
from rl.tasks.encoding import encode_prompt
from rl.training.logprobs import score_rows
from tests.rl.training.whole_groups import pack_rows

_HELD: dict[str, StoredWeights.Config | None] = {
    "float32": None,
    "int8 weights": StoredWeights.Config(),
    "int8 weights and vocabulary": StoredWeights.Config(vocabulary="int8"),
    "int4 weights, 32 inputs a scale": StoredWeights.Config(numbers="int4", group=32),
    "the same, int8 vocabulary": StoredWeights.Config(numbers="int4", group=32, vocabulary="int8"),
    "int4 weights": StoredWeights.Config(numbers="int4"),
    "int8 weights and activations": StoredWeights.Config(activations="int8"),
    "fp8 weights and activations": StoredWeights.Config(numbers="fp8", activations="fp8"),
}


def _factors(share: float) -> dict[str, FactorisedWeights.Config]:
    """Return ways to hold this share of the numbers, whitened by the text of `whitened_rollouts`, by name."""
    cfg: Any = get("demo")
    whitened_rollouts(cfg)
    whitened = cfg.engine.weights.clone(share=share)
    ways = {"plain": whitened.clone(calibration=None), "whitened": whitened}
    ways["whitened, of feed-forward networks alone"] = whitened.clone(layers=("feed_forward",))
    return {f"factors of {share} of the numbers, {way}": weights for way, weights in ways.items()}


# Fields of the engine, by its name.
ENGINES: dict[str, dict[str, Any]] = {
    **{name: {"weights": weights} for name, weights in _HELD.items()},
    "int8 keys and values": {"kv_cache_dtype": "int8"},
    "int8 weights, vocabulary, keys and values": {
        "weights": StoredWeights.Config(vocabulary="int8"),
        "kv_cache_dtype": "int8",
    },
    **{name: {"weights": weights} for share in (0.75, 0.5) for name, weights in _factors(share).items()},
}
SAMPLES = 16


def measure(params: Any, held: dict[str, Any], problems_per_family: int) -> dict[str, float]:
    """Return pass@1, its standard error over problems, and the shift of log-probabilities."""
    experiment: Any = get("demo").build()
    cfg, tokenizer = experiment.cfg, experiment.tokenizer
    tasks = cfg.tasks.build()
    problems = tasks.heldout(problems_per_family)
    prompts = [Prompt(p.id, p.family, encode_prompt(p.question, tokenizer)) for p in problems]
    engine = experiment.make_engine(**held)
    engine.set_weights(params, 0)
    drawn = engine.generate([Request(prompt, samples=SAMPLES) for prompt in prompts])
    groups = [Group(p, tuple(drawn[SAMPLES * i : SAMPLES * (i + 1)]), ()) for i, p in enumerate(prompts)]
    right = [
        [tasks.score(problem, answer_text(tokenizer, rollout.tokens.tolist())) == 1.0 for rollout in group.rollouts]
        for problem, group in zip(problems, groups, strict=True)
    ]
    each = np.mean(right, axis=1)
    found = {"pass@1": float(each.mean()), "error": float(each.std() / math.sqrt(len(each)))}
    return {**found, "shift": shift(cfg, params, groups)}


def shift(cfg: Any, params: Any, groups: list[Group]) -> float:
    """Return the mean magnitude of the difference between the engine's and the trainer's log-probabilities."""
    rows = pack_rows(
        groups, max_prompt_tokens=cfg.max_prompt_tokens, max_new_tokens=cfg.max_new_tokens, row_multiple=64
    )
    graphdef, _ = split(build_abstract(cfg.policy))
    with jax.set_mesh(make_mesh()):
        score = jax.jit(lambda params, *rest: score_rows(bind(graphdef, params), *rest))
        parts = [
            score(params, rows["tokens"][i : i + 512], rows["targets"][i : i + 512], jnp.ones(1)).logprobs()
            for i in range(0, len(rows["tokens"]), 512)
        ]
    scored, drawn = np.concatenate(parts), [rollout for group in groups for rollout in group.rollouts]
    each = zip(rows["first"], drawn, strict=True)
    differences = [scored[i, first : first + len(r.tokens)] - r.logprobs for i, (first, r) in enumerate(each)]
    return float(np.abs(np.concatenate(differences)).mean())


def without_wrappers(params: Any) -> Any:
    """Return the full weights of a policy that was trained with rounded ones."""
    if not isinstance(params, dict):
        return params
    return (
        without_wrappers(params["inner"]) if "inner" in params else {k: without_wrappers(v) for k, v in params.items()}
    )


@click.command()
@click.argument("run")
@click.option("--only", multiple=True, help="An engine by its name; may be repeated.")
@click.option("--problems", default=96, show_default=True, help="Problems of each family.")
def main(run: str, only: tuple[str, ...], problems: int) -> None:
    """Print a table."""
    params = without_wrappers(restore_params(run))
    print("| engine | pass@1 | standard error | shift of log-probabilities |\n|---|---|---|---|")
    for name in only or ENGINES:
        row = measure(params, ENGINES[name], problems)
        print(f"| {name} | {row['pass@1']:.3f} | {row['error']:.3f} | {row['shift']:.4f} |", flush=True)


if __name__ == "__main__":
    main()
