"""A trained model of ours against its export in Hugging Face's form: ids, logits and greedy completions.

Two commands in two environments, for the figures of docs/how-to/small-model.md:

    python -m tests.golden.trained_export ours RUN TEXTS.txt ours.npz        # the project's
    golden/bin/python tests/golden/trained_export.py theirs EXPORT ours.npz  # torch and transformers >= 5

Each line of TEXTS is a text. Everything is computed in float32, whatever the run was trained in.
"""

# pyright: reportMissingImports=false

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

PROMPT, NEW = 16, 64  # tokens


def ours(run_dir: Path, texts: list[str], out: Path) -> None:
    """Write ids, logits and greedy completions of a supervised run's newest weights."""
    import jax
    import jax.numpy as jnp

    from axlearn_like.checkpoint.reader import restore_params
    from axlearn_like.config import from_text, walk_configs
    from axlearn_like.layers.base import bind, build_abstract, split
    from axlearn_like.layers.contexts.paged import RowContext
    from axlearn_like.tokenizers.protocol import begin, completion_text
    from rl.protocol.messages import Prompt
    from rl.rollout.engine import RolloutEngine
    from rl.rollout.request import Request
    from rl.rollout.sampling import Sampler

    cfg: Any = from_text((run_dir / "config.txt").read_text())
    model = cfg.model.clone(dtype="float32")
    tokenizer: Any = next(
        found.build() for _, each in walk_configs(cfg.input) if (found := getattr(each, "tokenizer", None)) is not None
    )
    sizes = RolloutEngine.Config(
        model=model, stop_tokens=(), max_prompt_tokens=PROMPT, max_new_tokens=NEW, max_num_seqs=8
    )
    engine = sizes.set(sampler=Sampler.Config(temperature=0.0)).build(decode=partial(completion_text, tokenizer))
    params = restore_params(run_dir, engine.runner.weights_like)
    engine.set_weights(params, version=0)
    graphdef, _ = split(build_abstract(model))

    def logits(tokens: jax.Array) -> jax.Array:
        built: Any = bind(graphdef, params)
        return built.logits(built.hidden(tokens, RowContext(jnp.arange(tokens.shape[1])[None])).x)

    arrays: dict[str, np.ndarray] = {"texts": np.array(json.dumps(texts))}
    ids = [np.asarray([*begin(tokenizer), *tokenizer.encode(text)], np.int32) for text in texts]
    prompts = [Prompt(i, "text", tokens[:PROMPT]) for i, tokens in enumerate(ids)]
    greedy = engine.generate([Request(prompt) for prompt in prompts])
    for i, (tokens, rollout) in enumerate(zip(ids, greedy, strict=True)):
        arrays |= {f"ids/{i}": tokens, f"logits/{i}": np.asarray(jax.jit(logits)(jnp.asarray(tokens)[None])[0])}
        arrays[f"greedy/{i}"] = rollout.tokens
    np.savez_compressed(out, allow_pickle=False, **arrays)


def theirs(export: Path, path: Path) -> dict[str, Any]:
    """Return how transformers' ids, logits and completions differ from ours."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arrays = np.load(path)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    worst, same, tokens, equal = 0.0, 0, 0, 0
    texts = json.loads(str(arrays["texts"]))
    for i, text in enumerate(texts):
        ids, wanted = arrays[f"ids/{i}"], arrays[f"logits/{i}"]
        assert tokenizer(text).input_ids == ids.tolist(), text
        with torch.no_grad():
            found = model(torch.from_numpy(ids)[None].long()).logits[0].numpy()
            prompt = torch.from_numpy(ids[:PROMPT])[None].long()
            drawn = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        worst = max(worst, float(np.abs(found - wanted).max() / np.abs(wanted).max()))
        same += int((found.argmax(-1) == wanted.argmax(-1)).sum())
        tokens += len(ids)
        equal += drawn[0, len(ids[:PROMPT]) :].tolist() == arrays[f"greedy/{i}"].tolist()
    return {
        "texts": len(texts),
        "tokens": tokens,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "logits_relative_difference": worst,
        "top1_equal": same / tokens,
        "greedy_completions_equal": f"{equal} of {len(texts)}",
    }


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first, second = commands.add_parser("ours"), commands.add_parser("theirs")
    first.add_argument("run", type=Path)
    first.add_argument("texts", type=Path)
    first.add_argument("out", type=Path)
    second.add_argument("export", type=Path)
    second.add_argument("arrays", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "ours":
        texts = arguments.texts.read_text(encoding="utf-8").splitlines()
        ours(arguments.run, [text for text in texts if text.strip()], arguments.out)
    else:
        print(json.dumps(theirs(arguments.export, arguments.arrays), indent=2))


if __name__ == "__main__":
    main()
