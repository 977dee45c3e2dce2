"""Adapters against PEFT: a golden file made by tests/golden/peft_adapter.py."""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.parameter_names import merged
from axlearn_like.layers.wrappers.lora import LoRA
from models.huggingface.adapters import PeftAdapter, from_peft, to_peft
from models.huggingface.convert import from_huggingface
from models.huggingface.rows import ConversionError
from tests.golden import parity
from tests.models.huggingface.test_convert import GOLDEN, load


class Golden(NamedTuple):
    """An adapter by PEFT, its base, and tokens and logits."""

    adapter: PeftAdapter
    base: Decoder.Config
    weights: dict[str, np.ndarray]
    batch: dict[str, np.ndarray]


@pytest.fixture(scope="module", params=["peft_llama", "peft_dora", "peft_gpt2"])
def golden(request: pytest.FixtureRequest) -> Golden:
    if request.param == "peft_gpt2":
        base = parity.load("gpt2")
        cfg, weights = base.cfg, base.tensors
    else:
        cfg, weights, _ = load("llama_untied")
    adapter, batch = load_adapter(request.param)
    return Golden(adapter, cfg, weights, batch)


def load_adapter(name: str) -> tuple[PeftAdapter, dict[str, np.ndarray]]:
    """Return an adapter by PEFT, and tokens and logits."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    config = json.loads(str(arrays.pop("config")))
    tensors = {key.removeprefix("weights/"): arrays.pop(key) for key in list(arrays) if "/" in key}
    return PeftAdapter(tensors, config), arrays


def wrapped(plain: Any, cfg: Any) -> Any:
    """Return the parameters of a plain model in the places of one with LoRA layers, whose factors are left out."""
    layers = {
        name: {"inner": part} if isinstance(getattr(cfg.block, name, None), LoRA.Config) else part
        for name, part in plain["layers"].items()
    }
    return {**plain, "layers": layers}


@pytest.mark.numerics
def test_logits_are_those_of_peft(golden: Golden):
    adapter, plain_cfg, weights, batch = golden
    cfg, factors = from_peft(adapter, plain_cfg)
    params = merged(wrapped(from_huggingface(weights, plain_cfg), cfg), factors)
    graphdef, wanted = split(build_abstract(cfg))
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    tokens = jnp.asarray(batch["tokens"])[None]
    context = PackedContext(jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
    logits = jax.jit(lambda p: bind(graphdef, p)(tokens, context))(params)[0]
    np.testing.assert_allclose(np.asarray(logits), batch["logits"], atol=5e-5)


def test_the_round_trip_is_exact(golden: Golden):
    adapter = golden.adapter
    cfg, factors = from_peft(adapter, golden.base)
    back = to_peft(factors, cfg, base=adapter.config["base_model_name_or_path"] or "")
    assert back.tensors.keys() == adapter.tensors.keys()
    for name, tensor in adapter.tensors.items():
        np.testing.assert_array_equal(back.tensors[name], tensor)
    for name in (
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "peft_type",
        "task_type",
        "bias",
        "fan_in_fan_out",
        "rank_pattern",
    ):
        assert back.config[name] == adapter.config[name]
    assert set(back.config["target_modules"]) == set(adapter.config["target_modules"])


def test_what_is_not_computed_here_is_refused_by_name():
    (tensors, config), _ = load_adapter("peft_llama")
    cfg = load("llama_untied")[0]
    with pytest.raises(ConversionError, match="adapter_config.json: bias is 'all'; expected 'none'"):
        from_peft(PeftAdapter(tensors, {**config, "bias": "all"}), cfg)
    with pytest.raises(ConversionError, match="missing: .*lora_magnitude_vector"):
        from_peft(PeftAdapter(tensors, {**config, "use_dora": True}), cfg)
    name = next(iter(tensors))
    with pytest.raises(ConversionError, match="missing: .*lora_"):
        from_peft(PeftAdapter({key: value for key, value in tensors.items() if key != name}, config), cfg)
    other = name.replace("layers.0", "layers.9")
    with pytest.raises(ConversionError, match="unknown: .*layers.9"):
        from_peft(PeftAdapter({**tensors, other: tensors[name]}, config), cfg)
    with pytest.raises(ConversionError, match=r"is \(2, 2\); expected"):
        from_peft(PeftAdapter({**tensors, name: np.zeros((2, 2), np.float32)}, config), cfg)
    with pytest.raises(ConversionError, match="no LoRA layers"):
        to_peft({}, cfg)
