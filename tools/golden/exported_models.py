"""Logits of exports of small random decoders, ours beside those of Hugging Face transformers.

Two steps, for the two cannot live in one environment. The first, in the project's, makes a checkpoint for each case,
exports it with `axl convert export`'s function, and records logits of our own; the second, where torch and transformers
are, loads each export as any user would and compares:

    python -m tools.golden.exported_models make FOLDER
    golden/bin/python tools/golden/exported_models.py compare FOLDER

`logits DIRECTORY FILE.npz` records those of any directory in Hugging Face's form instead, such as a trained model's
export, and `compare` takes the folder that both are in (`NAME/` and `NAME.npz`). The last line is JSON: for each model
the largest difference over the largest logit, and the share of tokens with the same most likely next one.
"""

# pyright: reportMissingImports=false

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = (48, 17)  # of the texts; the longer is beyond the window of the cases that have one


def cases() -> dict[str, Any]:
    """Return small decoders, one for each architecture."""
    from axlearn_like.layers.attention.rope import Llama3Scaling
    from axlearn_like.layers.moe.experts import Experts
    from axlearn_like.layers.moe.layer import MoE
    from axlearn_like.layers.moe.router import SoftmaxRouter
    from models.dense import dense
    from models.moe import mixture

    shape: dict[str, Any] = {
        "vocab_size": 96,
        "dim": 64,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 24,
        "theta": 1e4,
        "eps": 1e-5,
        "max_length": 512,
    }
    scaling = Llama3Scaling.Config(factor=4.0, original_length=32)

    def experts(count: int, top_k: int) -> MoE.Config:
        router = SoftmaxRouter.Config(top_k=top_k)
        return MoE.Config(num_experts=count, router=router, experts=Experts.Config(hidden=32))

    mistral = dense(hidden=80, tied=False, **shape)
    mistral.block.attention.window = 16  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "LlamaForCausalLM": dense(hidden=80, tied=False, scaling=scaling, **shape),
        "MistralForCausalLM": mistral,
        "Qwen2ForCausalLM": dense(hidden=80, tied=True, qkv_bias=True, **shape),
        "Qwen3ForCausalLM": dense(hidden=80, tied=True, qk_norm=True, **shape),
        "Qwen3MoeForCausalLM": mixture(experts(6, 2), tied=False, qk_norm=True, **shape),
        "MixtralForCausalLM": mixture(experts(4, 2), tied=False, **shape),
    }


def make(folder: Path) -> None:
    """Export a checkpoint of each case, in several files, and record logits."""
    import jax
    from flax import nnx

    from axlearn_like.checkpoint.arrays import SavedParams
    from axlearn_like.checkpoint.checkpointer import Checkpointer
    from axlearn_like.layers.base import split
    from models.huggingface.checkpoints.exporting import export_checkpoint

    for seed, (name, cfg) in enumerate(cases().items()):
        params = split(cfg.build(rngs=nnx.Rngs(seed)))[1]
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
        saver = Checkpointer.Config(asynchronous=False).build(directory=folder / "checkpoints" / name)
        saver.save(0, {"params": jax.tree.unflatten(tree, noisy), "step": np.int32(0)}, {})
        saver.close()
        saved = SavedParams(folder / "checkpoints" / name)
        done = export_checkpoint(saved, cfg, folder / name, max_shard_size=60_000, token_ids={"eos_token_id": 1})
        assert done.architecture == name and done.files > 1, done
        logits(folder / name, folder / f"{name}.npz")


def logits(directory: Path, file: Path) -> None:
    """Record the logits of random texts by the model of a directory, in float32."""
    import jax
    import jax.numpy as jnp

    from axlearn_like.layers.base import bind, build_abstract, split
    from axlearn_like.layers.contexts.packed import PackedContext
    from models.huggingface import hf

    cfg = hf(directory, dtype="float32")
    graphdef, abstract = split(build_abstract(cfg))
    params = cfg.start_from.build().params(abstract)  # pyright: ignore[reportAttributeAccessIssue]
    found: dict[str, Any] = {}
    for length in LENGTHS:
        tokens = np.random.default_rng(length).integers(0, cfg.vocab_size, (1, length)).astype(np.int32)
        context = PackedContext(jnp.arange(length)[None], jnp.ones((1, length), jnp.int32))
        computed = jax.jit(lambda p, t, c: bind(graphdef, p)(t, c))(params, tokens, context)
        found |= {f"tokens_{length}": tokens, f"logits_{length}": np.asarray(computed)}
    np.savez_compressed(file, **found)


def compare(folder: Path) -> dict[str, Any]:
    """Return the differences of each recorded model from transformers."""
    import torch
    import transformers

    models: dict[str, Any] = {}
    for file in sorted(folder.glob("*.npz")):
        directory = folder / file.stem
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model.eval()
        difference = scale = 0.0
        same: list[bool] = []
        with np.load(file) as recorded:
            for length in LENGTHS:
                ours = recorded[f"logits_{length}"]
                with torch.no_grad():
                    theirs = model(torch.from_numpy(recorded[f"tokens_{length}"]).long()).logits.numpy()
                difference = max(difference, float(np.abs(ours - theirs).max()))
                scale = max(scale, float(np.abs(theirs).max()))
                same += (ours.argmax(-1) == theirs.argmax(-1)).ravel().tolist()
        relative, share = float(f"{difference / scale:.3g}"), float(np.mean(same))
        models[file.stem] = {"class": type(model).__name__, "relative_difference": relative, "same_top_1": share}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"models": models, "versions": versions}


def main() -> None:
    """Run one of the steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("make", "logits", "compare"))
    parser.add_argument("paths", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.step == "compare":
        result = compare(*arguments.paths)
        print(json.dumps(result))
        worst = max((model["relative_difference"] for model in result["models"].values()), default=1.0)
        same = all(model["same_top_1"] == 1 for model in result["models"].values())
        raise SystemExit(0 if worst <= 1e-4 and same else 1)
    {"make": make, "logits": logits}[arguments.step](*(path.absolute() for path in arguments.paths))


if __name__ == "__main__":
    main()
