"""Adapters of experts, of latent attention and of patterns of blocks: merged, and from and to PEFT's form."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.checkpoint.arrays import SavedParams
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import replace
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.base import split
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SigmoidRouter
from axlearn_like.layers.wrappers.base import plain_config, plain_params
from axlearn_like.layers.wrappers.lora import LoRA
from models.deepseek import latent_mixture
from models.huggingface.adapters import CONFIG, TENSORS, from_peft, to_peft
from models.huggingface.architectures import config_json
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.importing import import_checkpoint
from models.huggingface.checkpoints.merged import MergedParams
from models.huggingface.checkpoints.safetensors import SafetensorsWriter
from models.huggingface.checkpoints.with_adapter import with_adapter
from models.huggingface.convert import by_name, to_huggingface
from models.huggingface.rows import ConversionError
from tests.models.huggingface.checkpoints.made import mixture_model, write

FITTING = ("q_down_dr", "q_up_rkqh", "kv_down_dr", "out_kqhd")  # of latent attention, there whole layers


def latent():
    """A dense block, then two with a shared expert and three others; without YaRN."""
    attention = LatentAttention.Config(num_heads=2, q_rank=6, kv_rank=8, nope_dim=4, rope_dim=2, value_dim=4)
    router = SigmoidRouter.Config(top_k=2, groups=1, groups_kept=1)
    experts, shared = Experts.Config(hidden=6), SwiGLU.Config(hidden=6)
    mixture = MoE.Config(num_experts=3, router=router, experts=experts, shared=shared)
    shape = {"vocab_size": 19, "dim": 12, "hidden": 10, "num_layers": 3, "num_dense": 1}
    return latent_mixture(**shape, attention=attention, feed_forward=mixture)


def adapted(plain, match=("*",), **fields):
    """Return the model with LoRA around attention and feed-forward layers, and random parameters, factors too."""
    cfg = plain.clone()

    def wrap(block):
        attention = LoRA.Config(inner=block.attention, rank=2, match=match, **fields)
        return block.set(attention=attention, feed_forward=LoRA.Config(inner=block.feed_forward, rank=2, **fields))

    replace(cfg, Block.Config, wrap)
    graphdef, like = jax.eval_shape(lambda: split(cfg.build(rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return cfg, graphdef, jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), like)


@pytest.mark.parametrize(("plain", "fields"), [(mixture_model, {"magnitudes": True}), (latent, {})])
def test_export_import_and_merge_agree_for_every_matrix(tmp_path, plain, fields):
    """The adapter goes out and comes back beside its base; merged by entries it is what the layers compute with."""
    cfg, graphdef, params = adapted(plain(), FITTING if plain is latent else ("*",), **fields)
    there = to_peft(params, cfg)
    assert "base_model.model.model.layers.1.mlp.experts.2.down_proj.lora_B.weight" in there.tensors
    again, factors = from_peft(there, plain_config(cfg))
    found, wanted = by_name(factors), {name: x for name, x in by_name(params).items() if ".lora." in name}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert to_peft(factors, again).tensors.keys() == there.tensors.keys()

    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config_json(plain_config(cfg), "float32")))
    inner = {name.replace(".inner.", "."): x for name, x in by_name(params).items() if ".lora." not in name}
    base = jax.tree_util.tree_map_with_path(
        lambda path, _: inner[jax.tree_util.keystr(path, simple=True, separator=".")],
        jax.eval_shape(lambda: split(plain_config(cfg).build(rngs=nnx.Rngs(0)))[1]),
    )
    write(tmp_path / "base", to_huggingface(base, plain_config(cfg)))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(there.config))
    described = {name: ("F32", tensor.shape) for name, tensor in there.tensors.items()}
    with SafetensorsWriter(tmp_path / "adapter" / TENSORS, described) as out:
        for name in described:
            out.write(name, there.tensors[name])
    source = with_adapter(HuggingFaceDirectory.open(tmp_path / "base"), tmp_path / "adapter")
    import_checkpoint(source, tmp_path / "run")
    merged = MergedParams(SavedParams(tmp_path / "run"), source.decoder)
    summed = by_name(jax.jit(lambda p: plain_params(graphdef, p))(params))
    for name, entry in merged.manifest.items():
        whole = np.asarray(summed[name.replace("/", ".")])
        stacked = 2 if "/experts/" in name else 1 if name.startswith(("layers", "leading")) else 0
        order = tuple(range(whole.ndim - stacked))
        for index in np.ndindex(*entry["shape"][:stacked]):
            part = merged.entry(name, index, order)
            np.testing.assert_allclose(part, whole[index], rtol=2e-5, atol=1e-4, err_msg=name)


def test_what_lies_in_one_matrix_there_is_refused_by_its_name(tmp_path):
    """Keys and values of all heads come from one matrix there, whose factors are not those of its parts."""
    cfg, graphdef, params = adapted(latent())
    with pytest.raises(ConversionError, match=r"factor layers\.attention\.lora\.k_up_a_rl .* export .* --merge"):
        to_peft(params, cfg)
    saver = Checkpointer.Config(asynchronous=False).build(directory=tmp_path / "checkpoints")
    saver.save(0, {"params": jax.tree.map(jnp.asarray, params), "step": jnp.int32(0)}, {})
    saver.close()
    part = MergedParams(SavedParams(tmp_path), cfg).entry("layers/attention/k_up_rkh", (1,), (0, 1, 2))
    summed = plain_params(graphdef, params)["layers"]["attention"]["k_up_rkh"][1]
    np.testing.assert_allclose(part, np.asarray(summed), rtol=2e-5, atol=1e-5)
