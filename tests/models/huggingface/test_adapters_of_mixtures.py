"""Adapters of experts, of latent attention, of patterns of blocks and of GPT-2: merged, and from and to PEFT's form."""

import json

import jax
import numpy as np
import pytest

from axlearn_like.checkpoint.arrays import SavedParams
from axlearn_like.config import replace
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SigmoidRouter
from axlearn_like.layers.wrappers.base import plain_config, plain_params
from axlearn_like.layers.wrappers.lora import LoRA
from models.deepseek import latent_mixture
from models.gpt2 import layer_norm_decoder
from models.gpt_oss import sink_mixture
from models.huggingface.adapters import CONFIG, TENSORS, from_peft, to_peft
from models.huggingface.architectures import config_json
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.importing import import_checkpoint
from models.huggingface.checkpoints.importing_adapter import with_adapter
from models.huggingface.checkpoints.merged import MergedParams
from models.huggingface.convert import by_name, to_huggingface
from models.huggingface.rows import ConversionError
from models.huggingface.tensor_files.safetensors import SafetensorsWriter
from tests.models.huggingface.checkpoints.made import mixture_model, write

pytestmark = pytest.mark.numerics


def latent():
    """A dense block, then two with a shared expert and three others; without YaRN."""
    attention = LatentAttention.Config(num_heads=2, q_rank=6, kv_rank=8, nope_dim=4, rope_dim=2, value_dim=4)
    router = SigmoidRouter.Config(top_k=2, groups=1, groups_kept=1)
    experts, shared = Experts.Config(hidden=6), SwiGLU.Config(hidden=6)
    mixture = MoE.Config(num_experts=3, router=router, experts=experts, shared=shared)
    shape = {"vocab_size": 19, "dim": 12, "hidden": 10, "num_layers": 3, "num_dense": 1}
    return latent_mixture(**shape, attention=attention, feed_forward=mixture)


def packed():
    """Two blocks with experts that are one parameter there, with and without a window."""
    sizes = {"vocab_size": 19, "dim": 12, "hidden": 6, "num_layers": 2, "heads": (4, 2, 4), "num_experts": 3}
    rope = Rope.Config(theta=1e4)
    return sink_mixture(**sizes, top_k=2, rope=rope, window=4)


def one_matrix():
    """GPT-2: queries, keys and values are one matrix there, and its matrices are [in, out]."""
    return layer_norm_decoder(vocab_size=19, max_length=16, dim=12, num_layers=2, num_heads=2, hidden=10)


def adapted(plain, match=("*",), *, equal=False, **fields):
    """Return the model with LoRA around attention and feed-forward layers, and random parameters, factors too.

    `equal`: the keys and values of latent attention have the same factor A.
    """
    cfg = plain.clone()

    def wrap(block):
        attention = LoRA.Config(inner=block.attention, rank=2, match=match, **fields)
        return block.set(attention=attention, feed_forward=LoRA.Config(inner=block.feed_forward, rank=2, **fields))

    replace(cfg, Block.Config, wrap)
    graphdef, like = split(build_abstract(cfg))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), like)
    for stack in ("leading", "layers") if equal else ():
        factors = params[stack]["attention"]["lora"]
        factors["v_up_a_rl"] = factors["k_up_a_rl"].copy()
    return cfg, graphdef, params


@pytest.mark.parametrize(
    ("plain", "fields"),
    [
        (mixture_model, {"magnitudes": True}),
        (one_matrix, {"magnitudes": True}),
        pytest.param(latent, {}, marks=pytest.mark.full),
        pytest.param(latent, {"rank_stabilised": True}, marks=pytest.mark.full),
        pytest.param(packed, {}, marks=pytest.mark.full),
    ],
)
def test_export_import_and_merge_agree_for_every_matrix(tmp_path, plain, fields):
    """The adapter goes out and comes back beside its base; merged by entries it is what the layers compute with."""
    equal = plain is latent and not fields
    cfg, graphdef, params = adapted(plain(), equal=equal, **fields)
    there = to_peft(params, cfg)
    layers = {packed: "model.layers.1.mlp.experts", one_matrix: "transformer.h.1.attn.c_attn"}
    layer, wide = layers.get(plain, "model.layers.1.mlp.experts.2.down_proj"), plain in layers or plain is latent
    wide = wide and not equal
    assert f"base_model.model.{layer}.lora_B.weight" in there.tensors
    assert there.config["fan_in_fan_out"] == (plain is one_matrix)
    assert bool(there.config["rank_pattern"]) == wide
    assert_comes_back(there, cfg, params)

    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config_json(plain_config(cfg), "float32")))
    inner = {name.replace(".inner.", "."): x for name, x in by_name(params).items() if ".lora." not in name}
    base = jax.tree_util.tree_map_with_path(
        lambda path, _: inner[jax.tree_util.keystr(path, simple=True, separator=".")],
        split(build_abstract(plain_config(cfg)))[1],
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


@pytest.mark.parametrize("stabilised", [pytest.param(False, marks=pytest.mark.full), True])
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
    assert_comes_back(there, cfg, params)
    wrong = there._replace(config={**there.config, "rank_pattern": {"kv_b_proj": 3}})
    with pytest.raises(ConversionError, match=r"rank_pattern is .*'kv_b_proj': 3.*; expected .*'kv_b_proj': 4"):
        from_peft(wrong, plain_config(cfg))
    name = layer.format(1) + ".lora_B.weight"
    mixed = there._replace(tensors={**there.tensors, name: there.tensors[name] + 1})
    with pytest.raises(ConversionError, match=rf"{name}: 2 times the rank .* expected zeros outside of the blocks"):
        from_peft(mixed, plain_config(cfg))


def assert_comes_back(there, cfg, params):
    """The adapter that comes in has the factors that went out, to the bit."""
    again, factors = from_peft(there, plain_config(cfg))
    found, wanted = by_name(factors), {name: x for name, x in by_name(params).items() if ".lora." in name}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    second = to_peft(factors, again)
    assert second.config == there.config and second.tensors.keys() == there.tensors.keys()
    for name, array in second.tensors.items():
        np.testing.assert_array_equal(array, there.tensors[name], err_msg=name)


@pytest.mark.parametrize(
    "match",
    [
        ("experts/*",),
        pytest.param(("experts/down_*",), marks=pytest.mark.full),
        pytest.param(("experts/gate_*", "experts/up_*"), marks=pytest.mark.full),
    ],
)
def test_experts_that_are_one_parameter_there_go_out_and_come_back(match):
    """A is [experts * rank, in], an expert after the other, and B [out, rank * experts], as PEFT computes."""
    cfg = adapted(packed())[0]
    replace(cfg, LoRA.Config, lambda one: one.set(match=match) if isinstance(one.inner, MoE.Config) else one)
    graphdef, like = split(build_abstract(cfg))
    params = jax.tree.map(lambda leaf: np.random.default_rng(leaf.size).standard_normal(leaf.shape, np.float32), like)
    there = to_peft(params, cfg)
    down, both = "experts/down_*" in match, match == ("experts/*",)
    names = [f"mlp.experts.{one}" for one in ("down_proj", "gate_up_proj") if both or (one == "down_proj") == down]
    assert there.config["target_parameters"] == names
    summed = plain_params(graphdef, params)["layers"]["feed_forward"]["experts"]
    inner = params["layers"]["feed_forward"]["inner"]["experts"]
    for parameter in names:
        outer = "mlp.experts.base_layer" if both and parameter.endswith("gate_up_proj") else "mlp.experts"
        module = f"base_model.model.model.layers.1.{outer}"
        a, b = (there.tensors[f"{module}.lora_{one}.weight"] for one in "AB")
        rank = there.config["rank_pattern"].get(parameter.removeprefix("mlp."), 2)
        alpha = there.config["alpha_pattern"].get(parameter.removeprefix("mlp."), there.config["lora_alpha"])
        assert a.shape[0] == b.shape[1] == 3 * rank
        update = alpha / rank * np.einsum("ore,eri->eio", b.reshape(len(b), rank, 3), a.reshape(3, rank, -1))
        here = (
            {"down_efd": update} if "down" in parameter else {"gate_edf": update[..., ::2], "up_edf": update[..., 1::2]}
        )
        for name, wanted in here.items():
            found = np.asarray(summed[name][1]) - inner[name][1]
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-4, err_msg=name)
    assert_comes_back(there, cfg, params)


def test_factors_of_a_part_of_a_layer_there_are_refused_by_their_names():
    cfg, _, params = adapted(latent(), ("k_up_rkh", "out_*"))
    with pytest.raises(ConversionError, match=r"attention: k_up_rkh alone .* k_up_rkh and v_up_rkh are one .* --merge"):
        to_peft(params, cfg)
