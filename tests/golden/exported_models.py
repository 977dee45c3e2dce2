"""Logits of exports of small random decoders, ours beside those of Hugging Face transformers.

Two steps, for the two cannot live in one environment. The first, in the project's, makes a checkpoint for each case,
exports it with `axl convert export`'s function, and records logits of our own; the second, where torch and transformers
are, loads each export as any user would, compares, and writes what docs/reference/parity.md is made from:

    python -m tests.golden.exported_models make FOLDER
    golden/bin/python tests/golden/exported_models.py compare FOLDER docs/figures/exported_models.json

`logits DIRECTORY FILE.npz` records those of any directory in Hugging Face's form instead, such as a trained model's
export, and `compare` takes the folder that both are in (`NAME/` and `NAME.npz`). The last line is JSON: for each model
the largest difference over the largest logit, and the share of tokens with the same most likely next one.
"""

# pyright: reportMissingImports=false

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = (48, 17)  # of the texts; the longer is beyond the window of the cases that have one


def cases() -> dict[str, tuple[str, Any]]:
    """Return small decoders, at least one for each architecture, with its name."""
    return {**_dense(), **_mixtures(), **_patterns()}


SHAPE: dict[str, Any] = {"vocab_size": 96, "dim": 64, "num_layers": 3}
HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 24}
ROPE: dict[str, Any] = {"theta": 1e4, "eps": 1e-5, "max_length": 512}


def _dense() -> dict[str, tuple[str, Any]]:
    from axlearn_like.layers.attention.rope import Llama3Scaling
    from axlearn_like.layers.attention.rope_scaling import LinearScaling, YarnScaling
    from axlearn_like.layers.heads import ScoreHead
    from models.dense import dense
    from models.gpt2 import layer_norm_decoder

    shape: dict[str, Any] = {**SHAPE, **HEADS, **ROPE, "hidden": 80}
    llama3 = Llama3Scaling.Config(factor=4.0, original_length=32)
    mistral = dense(tied=False, **shape)
    mistral.block.attention.window = 16  # pyright: ignore[reportAttributeAccessIssue]
    linear, yarn = dense(tied=False, **shape), dense(tied=True, qkv_bias=True, **{**shape, "max_length": 64})
    linear.block.attention.rope.scaling = LinearScaling.Config(factor=4.0)  # pyright: ignore[reportAttributeAccessIssue]
    yarn.block.attention.rope.scaling = YarnScaling.Config(  # pyright: ignore[reportAttributeAccessIssue]
        factor=4.0, original_length=16
    )
    qwen3 = dense(tied=True, qk_norm=True, **shape)
    return {
        "llama": ("LlamaForCausalLM", dense(tied=False, scaling=llama3, **shape)),
        "llama_linear": ("LlamaForCausalLM", linear),
        "mistral": ("MistralForCausalLM", mistral),
        "qwen2": ("Qwen2ForCausalLM", dense(tied=True, qkv_bias=True, **shape)),
        "qwen2_yarn": ("Qwen2ForCausalLM", yarn),
        "qwen3": ("Qwen3ForCausalLM", qwen3),
        "qwen3_reward": ("Qwen3ForSequenceClassification", qwen3.clone(head=ScoreHead.Config())),
        "gpt2": ("GPT2LMHeadModel", layer_norm_decoder(**SHAPE, num_heads=4, max_length=64)),
    }


def _mixtures() -> dict[str, tuple[str, Any]]:
    from axlearn_like.layers.attention.latent import LatentAttention
    from axlearn_like.layers.attention.rope import InterleavedRope
    from axlearn_like.layers.attention.rope_scaling import YarnScaling
    from axlearn_like.layers.feed_forward import SwiGLU
    from axlearn_like.layers.moe.experts import Experts
    from axlearn_like.layers.moe.layer import MoE
    from axlearn_like.layers.moe.router import SigmoidRouter, SoftmaxRouter
    from models.deepseek import latent_mixture
    from models.moe import mixture

    def experts(count: int, router: Any, **more: Any) -> MoE.Config:
        return MoE.Config(num_experts=count, router=router, experts=Experts.Config(hidden=32), **more)

    shape: dict[str, Any] = {**SHAPE, **HEADS, **ROPE, "tied": False}
    two = SoftmaxRouter.Config(top_k=2)
    yarn = YarnScaling.Config(factor=4.0, original_length=16, mscale=1.0, mscale_all_dim=1.0)
    latent = LatentAttention.Config(
        num_heads=4,
        q_rank=24,
        kv_rank=16,
        nope_dim=16,
        rope_dim=8,
        value_dim=12,
        rope=InterleavedRope.Config(scaling=yarn, max_length=64),
    )
    grouped = SigmoidRouter.Config(top_k=2, scale=2.5, groups=4, groups_kept=2)
    deepseek = latent_mixture(
        **SHAPE,
        hidden=80,
        num_dense=1,
        attention=latent,
        feed_forward=experts(8, grouped, shared=SwiGLU.Config(hidden=32)),
    )
    return {
        "qwen3_moe": ("Qwen3MoeForCausalLM", mixture(experts(6, two), qk_norm=True, **shape)),
        "mixtral": ("MixtralForCausalLM", mixture(experts(4, two), **shape)),
        "deepseek_v3": ("DeepseekV3ForCausalLM", deepseek),
    }


def _patterns() -> dict[str, tuple[str, Any]]:
    from axlearn_like.layers.attention.rope import Rope
    from axlearn_like.layers.attention.rope_scaling import LinearScaling, YarnScaling
    from models.gemma import gemma2, gemma3
    from models.gpt_oss import sink_mixture

    heads = (4, 2, 24)
    shape: dict[str, Any] = {**SHAPE, "hidden": 80, "heads": heads, "scalar": 32}
    near, far = Rope.Config(theta=1e4, max_length=512), Rope.Config(theta=1e6, max_length=512)
    yarn = YarnScaling.Config(factor=4.0, original_length=16, truncate=False)
    return {
        "gemma2": ("Gemma2ForCausalLM", gemma2(window=16, score_cap=2.0, logit_cap=5.0, **shape)),
        "gemma3": (
            "Gemma3ForCausalLM",
            gemma3(
                window=16,
                local=near,
                far=far.set(scaling=LinearScaling.Config(factor=8.0)),
                kinds=(True, True, False),
                **{**shape, "num_layers": 5},  # a round and a rest
            ),
        ),
        "gpt_oss": (
            "GptOssForCausalLM",
            sink_mixture(
                **SHAPE,
                hidden=32,
                heads=heads,
                num_experts=4,
                top_k=2,
                rope=near.clone(scaling=yarn, max_length=64),
                window=16,
                limit=1.0,
            ),
        ),
    }


def make(folder: Path) -> None:
    """Export a checkpoint of each case, in several files, and record logits."""
    import jax
    from flax import nnx

    from axlearn_like.checkpoint.arrays import SavedParams
    from axlearn_like.checkpoint.checkpointer import Checkpointer
    from axlearn_like.layers.base import split
    from models.huggingface.checkpoints.exporting import ExportedTokenizer, export_checkpoint

    for seed, (name, (architecture, cfg)) in enumerate(cases().items()):
        params = split(cfg.build(rngs=nnx.Rngs(seed)))[1]
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
        saver = Checkpointer.Config(asynchronous=False).build(directory=folder / "checkpoints" / name)
        saver.save(0, {"params": jax.tree.unflatten(tree, noisy), "step": np.int32(0)}, {})
        saver.close()
        saved = SavedParams(folder / "checkpoints" / name)
        done = export_checkpoint(
            saved, cfg, folder / name, max_shard_size=60_000, tokenizer=ExportedTokenizer(ids={"eos_token_id": 1})
        )
        assert done.architecture == architecture and done.files > 1, done
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
        (name,) = json.loads((directory / "config.json").read_text())["architectures"]
        sequences = name.endswith("ForSequenceClassification")
        auto = transformers.AutoModelForSequenceClassification if sequences else transformers.AutoModelForCausalLM
        model, loading = auto.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
        assert type(model).__name__ == name and not any(loading.values()), (type(model), loading)
        model.eval()
        difference = scale = 0.0
        same: list[bool] = []
        with np.load(file) as recorded:
            for length in LENGTHS:
                ours = recorded[f"logits_{length}"]
                ours = ours[:, -1] if sequences else ours  # of a sequence at its last token
                with torch.no_grad():
                    theirs = model(torch.from_numpy(recorded[f"tokens_{length}"]).long()).logits.numpy()
                difference = max(difference, float(np.abs(ours - theirs).max()))
                scale = max(scale, float(np.abs(theirs).max()))
                same += (ours.argmax(-1) == theirs.argmax(-1)).ravel().tolist()
        relative, share = float(f"{difference / scale:.3g}"), float(np.mean(same))
        models[file.stem] = {"class": name, "relative_difference": relative, "same_top_1": share}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"models": models, "versions": versions, "date": datetime.date.today().isoformat()}


def main() -> None:
    """Run one of the steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("make", "logits", "compare"))
    parser.add_argument("paths", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.step == "compare":
        result = compare(arguments.paths[0])
        print(json.dumps(result))
        for path in arguments.paths[1:]:
            path.write_text(json.dumps(result, indent=1) + "\n")
        worst = max((model["relative_difference"] for model in result["models"].values()), default=1.0)
        same = all(model["same_top_1"] == 1 for model in result["models"].values())
        raise SystemExit(0 if worst <= 1e-4 and same else 1)
    {"make": make, "logits": logits}[arguments.step](*(path.absolute() for path in arguments.paths))


if __name__ == "__main__":
    main()
