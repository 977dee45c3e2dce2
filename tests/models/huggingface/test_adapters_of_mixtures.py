"""Adapters of experts, of latent attention and of patterns of blocks: merged, and from and to PEFT's form."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_like.checkpoint.arrays import SavedParams
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
from models.huggingface.checkpoints.with_adapter import with_adapter
from models.huggingface.convert import by_name, to_huggingface
from models.huggingface.rows import ConversionError
from models.huggingface.tensor_files.safetensors import SafetensorsWriter
from tests.models.huggingface.checkpoints.made import mixture_model, write


def latent():
    """A dense block, then two with a shared expert and three others; without YaRN."""
    attention = LatentAttention.Config(num_heads=2, q_rank=6, kv_rank=8, nope_dim=4, rope_dim=2, value_dim=4)
    router = SigmoidRouter.Config(top_k=2, groups=1, groups_kept=1)
    experts, shared = Experts.Config(hidden=6), SwiGLU.Config(hidden=6)
    mixture = MoE.Config(num_experts=3, router=router, experts=experts, shared=shared)
    shape = {"vocab_size": 19, "dim": 12, "hidden": 10, "num_layers": 3, "num_dense": 1}
    return latent_mixture(**shape, attention=attention, feed_forward=mixture)


def adapted(plain, match=("*",), *, equal=False, **fields):
    """Return the model with LoRA around attention and feed-forward layers, and random parameters, factors too.

    `equal`: the keys and values of latent attention have the same factor A.
    """
    cfg = plain.clone()

    def wrap(block):
        attention = LoRA.Config(inner=block.attention, rank=2, match=match, **fields)
        return block.set(attention=attention, feed_forward=LoRA.Config(inner=block.feed_forward, rank=2, **fields))

    replace(cfg, Block.Config, wrap)
    graphdef, like = jax.eval_shape(lambda: split(cfg.build(rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), like)
    for stack in ("leading", "layers") if equal else ():
        factors = params[stack]["attention"]["lora"]
        factors["v_up_a_rl"] = factors["k_up_a_rl"].copy()
    return cfg, graphdef, params


@pytest.mark.parametrize(("plain", "fields"), [(mixture_model, {"magnitudes": True}), (latent, {})])
def test_export_import_and_merge_agree_for_every_matrix(tmp_path, plain, fields):
    """The adapter goes out and comes back beside its base; merged by entries it is what the layers compute with."""
    cfg, graphdef, params = adapted(plain(), equal=plain is latent, **fields)
    there = to_peft(params, cfg)
    assert "base_model.model.model.layers.1.mlp.experts.2.down_proj.lora_B.weight" in there.tensors
    again, factors = from_peft(there, plain_config(cfg))
    found, wanted = by_name(factors), {name: x for name, x in by_name(params).items() if ".lora." in name}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert to_peft(factors, again).tensors.keys() == there.tensors.keys() and not there.config["rank_pattern"]

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


@pytest.mark.parametrize("stabilised", [False, True])
def test_keys_and_values_with_different_factors_have_a_rank_each_in_the_layer_there(stabilised):
    """The matrix there, `kv_b_proj`, has for each head first the rows of its keys, then those of its values."""
    cfg, graphdef, params = adapted(latent(), rank_stabilised=stabilised)
    there = to_peft(params, cfg)
    assert there.config["rank_pattern"] == {"kv_b_proj": 4}  # of all others 2
    alpha, layer = there.config["alpha_pattern"]["kv_b_proj"], "base_model.model.model.layers.{}.self_attn.kv_b_proj"
    summed = plain_params(graphdef, params)
    for number, (stack, index) in enumerate([("leading", 0), ("layers", 0), ("layers", 1)]):
        a, b = (there.tensors[f"{layer.format(number)}.lora_{one}.weight"] for one in "AB")
        update = (alpha / (2.0 if stabilised else 4.0) * b @ a).reshape(2, 8, 8)  # heads, keys and values, kv_rank
        for part, name in ((update[:, :4], "k_up_rkh"), (update[:, 4:], "v_up_rkh")):
            inner = params[stack]["attention"]["inner"][name][index]
            wanted = np.asarray(summed[stack]["attention"][name][index]) - inner
            np.testing.assert_allclose(part.transpose(2, 0, 1), wanted, rtol=2e-5, atol=1e-4)
    with pytest.raises(ConversionError, match=r"rank_pattern is .*kv_b_proj"):
        from_peft(there, plain_config(cfg))


def test_factors_of_a_part_of_a_layer_there_are_refused_by_their_names():
    cfg, _, params = adapted(latent(), ("k_up_rkh", "out_*"))
    with pytest.raises(ConversionError, match=r"attention: k_up_rkh alone .* k_up_rkh and v_up_rkh are one .* --merge"):
        to_peft(params, cfg)
