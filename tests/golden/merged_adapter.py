"""The three exports of a model with LoRA (base, adapter, merged) in transformers and PEFT, beside our own logits.

Two steps in two environments. The first trains nothing: factors are random, so that none of them is zero.

    python -m tests.golden.merged_adapter make FOLDER [--mixture | --latent | --sinks | --gpt2] [--dora]
    golden/bin/python tests/golden/merged_adapter.py compare FOLDER     # torch, transformers >= 5 and peft

The last line is JSON: the largest difference from our logits, over the largest logit, of the merged export in
transformers, of base and adapter in PEFT, and of those merged by PEFT; and of the base alone, which shows what the
adapter does.
"""

# pyright: reportMissingImports=false

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

LENGTH, VOCAB, DIM, RANK = 48, 96, 64, 4


def adapted(kind: str, dora: bool) -> Any:
    """Return the config of a decoder with LoRA layers; arguments as the options."""
    from axlearn_like.config import replace
    from axlearn_like.layers.decoder import Block
    from axlearn_like.layers.wrappers.lora import LoRA

    cfg = {"dense": _dense, "mixture": _mixture, "latent": _latent, "sinks": _sinks, "gpt2": _gpt2}[kind]()
    adapt = lambda inner: LoRA.Config(inner=inner, rank=RANK, alpha=8.0, magnitudes=dora)  # noqa: E731
    # PEFT 0.21 moves the adapters of DeepSeek's feed-forward layers to the experts alone.
    parts = ("attention",) if kind == "latent" else ("attention", "feed_forward")
    replace(cfg, Block.Config, lambda block: block.set(**{part: adapt(getattr(block, part)) for part in parts}))
    return cfg


def _llama_like() -> dict[str, Any]:
    shape: dict[str, Any] = {"vocab_size": VOCAB, "dim": DIM, "num_layers": 3, "tied": False, "theta": 1e4, "eps": 1e-5}
    return {**shape, "num_heads": 4, "num_kv_heads": 2, "head_dim": 24, "max_length": 512}


def _dense() -> Any:
    from models.dense import dense

    return dense(hidden=80, **_llama_like())


def _mixture() -> Any:
    from axlearn_like.layers.moe.experts import Experts
    from axlearn_like.layers.moe.layer import MoE
    from axlearn_like.layers.moe.router import SoftmaxRouter
    from models.moe import mixture

    experts = MoE.Config(num_experts=4, router=SoftmaxRouter.Config(top_k=2), experts=Experts.Config(hidden=40))
    return mixture(experts, qk_norm=True, **_llama_like())


def _latent() -> Any:
    from axlearn_like.layers.attention.latent import LatentAttention
    from axlearn_like.layers.feed_forward import SwiGLU
    from axlearn_like.layers.moe.experts import Experts
    from axlearn_like.layers.moe.layer import MoE
    from axlearn_like.layers.moe.router import SigmoidRouter
    from models.deepseek import latent_mixture

    attention = LatentAttention.Config(num_heads=4, q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, value_dim=12)
    router = SigmoidRouter.Config(top_k=2, groups=1, groups_kept=1)
    routed, shared = Experts.Config(hidden=40), SwiGLU.Config(hidden=40)
    layer = MoE.Config(num_experts=4, router=router, experts=routed, shared=shared)
    sizes = {"vocab_size": VOCAB, "dim": DIM, "hidden": 80, "num_layers": 3, "num_dense": 1}
    return latent_mixture(**sizes, attention=attention, feed_forward=layer)


def _sinks() -> Any:
    from axlearn_like.layers.attention.rope import Rope
    from models.gpt_oss import sink_mixture

    sizes: dict[str, Any] = {"vocab_size": VOCAB, "dim": DIM, "hidden": 40, "num_layers": 3, "num_experts": 4}
    return sink_mixture(**sizes, window=16, heads=(4, 2, 16), top_k=2, rope=Rope.Config(theta=1e4))


def _gpt2() -> Any:
    from models.gpt2 import layer_norm_decoder

    return layer_norm_decoder(vocab_size=VOCAB, max_length=64, dim=DIM, num_layers=3, num_heads=4)


def make(folder: Path, kind: str, *, dora: bool) -> None:
    """Save a checkpoint with LoRA layers, export it in all three ways, and record logits; arguments as the options."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from axlearn_like.checkpoint.arrays import SavedParams
    from axlearn_like.checkpoint.checkpointer import Checkpointer
    from axlearn_like.layers.base import bind, split
    from axlearn_like.layers.contexts.packed import PackedContext
    from axlearn_like.layers.wrappers.base import plain_config
    from models.huggingface.checkpoints.exporting import ExportedTokenizer, export_checkpoint
    from models.huggingface.checkpoints.exporting_adapter import export_adapter
    from models.huggingface.checkpoints.merged import MergedParams

    cfg = adapted(kind, dora)
    graphdef, params = split(cfg.build(rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    params = jax.tree.unflatten(tree, noisy)
    saver = Checkpointer.Config(asynchronous=False).build(directory=folder / "checkpoint")
    saver.save(0, {"params": params, "step": np.int32(0)}, {})
    saver.close()
    saved = SavedParams(folder / "checkpoint")
    base = MergedParams(saved, cfg, scale=0.0)
    for name, found in (("merged", MergedParams(saved, cfg)), ("base", base)):
        export_checkpoint(found, plain_config(cfg), folder / name, tokenizer=ExportedTokenizer(ids={"eos_token_id": 1}))
    export_adapter(saved, cfg, folder / "adapter", str(folder / "base"))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, LENGTH)).astype(np.int32)
    context = PackedContext(jnp.arange(LENGTH)[None], jnp.ones((1, LENGTH), jnp.int32))
    computed: Any = jax.jit(lambda p: bind(graphdef, p)(tokens, context))(params)  # pyright: ignore
    np.savez_compressed(folder / "ours.npz", tokens=tokens, logits=np.asarray(computed))


def compare(folder: Path) -> dict[str, float]:
    """Return the relative differences."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with np.load(folder / "ours.npz") as file:
        tokens, ours = torch.from_numpy(file["tokens"]).long(), file["logits"]

    def difference(model: Any) -> float:
        with torch.no_grad():
            theirs = model.eval()(tokens).logits.numpy()
        return float(f"{np.abs(ours - theirs).max() / np.abs(ours).max():.3g}")

    def loaded(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)

    adapted = PeftModel.from_pretrained(loaded("base"), str(folder / "adapter"))
    found = {"merged_here": difference(loaded("merged")), "adapter_in_peft": difference(adapted)}
    found["merged_by_peft"] = difference(adapted.merge_and_unload())
    return {**found, "base_alone": difference(loaded("base"))}


def main() -> None:
    """Run one of the steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("make", "compare"))
    parser.add_argument("folder", type=Path)
    kind = parser.add_mutually_exclusive_group()
    add = partial(kind.add_argument, dest="kind", action="store_const", default="dense")
    add("--mixture", const="mixture", help="A mixture of experts instead of a dense model.")
    add("--sinks", const="sinks", help="The shape of gpt-oss, whose experts are one parameter; without its router.")
    add("--latent", const="latent", help="A mixture with latent attention, which is adapted alone.")
    add("--gpt2", const="gpt2", help="The shape of GPT-2, whose matrices are [in, out], with one for q, k and v.")
    parser.add_argument("--dora", action="store_true", help="Each output has a magnitude, too.")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    if arguments.step == "make":
        return make(folder, arguments.kind, dora=arguments.dora)
    found = compare(folder)
    print(json.dumps(found))
    alike = max(found["merged_here"], found["adapter_in_peft"], found["merged_by_peft"]) <= 1e-4
    raise SystemExit(0 if alike and found["base_alone"] > 1e-2 else 1)


if __name__ == "__main__":
    main()
