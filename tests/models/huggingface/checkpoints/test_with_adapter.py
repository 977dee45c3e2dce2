"""Import of a base with an adapter of PEFT: one model, which gives both back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from axlearn_like.checkpoint.arrays import SavedParams
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.config import from_text
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.wrappers.adapters import adapter_of
from axlearn_like.layers.wrappers.base import plain_config
from mesh import UserError
from models.huggingface.architectures import config_json
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.exporting import Original, export_checkpoint
from models.huggingface.checkpoints.exporting_adapter import export_adapter
from models.huggingface.checkpoints.importing import import_checkpoint
from models.huggingface.checkpoints.importing_adapter import with_adapter
from models.huggingface.checkpoints.merged import MergedParams
from models.huggingface.convert import from_huggingface
from models.huggingface.rows import ConversionError
from tests.models.huggingface.checkpoints.made import write
from tests.models.huggingface.test_adapters import load_adapter
from tests.models.huggingface.test_convert import load

pytestmark = pytest.mark.numerics


def made(folder, name):
    """Write a base and an adapter as directories; returns the adapter's tensors, and tokens and logits by PEFT."""
    cfg, weights, _ = load("llama_untied")
    (tensors, config), arrays = load_adapter(name)
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps(config_json(cfg)))
    write(folder / "base", dict(weights))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    return tensors, arrays


@pytest.mark.parametrize("name", ["peft_dora", pytest.param("peft_llama", marks=pytest.mark.full)])
def test_a_merged_export_has_the_logits_of_peft_and_the_adapter_comes_back_to_the_bit(tmp_path, name):
    folder = tmp_path
    tensors, arrays = made(folder, name)
    source = with_adapter(HuggingFaceDirectory.open(folder / "base"), folder / "adapter")
    import_checkpoint(source, folder / "run", chunk_bytes=9000)
    decoder = from_text((folder / "run" / "config.txt").read_text())
    saved = SavedParams(folder / "run")
    plain = plain_config(decoder)
    original = Original.of(folder / "run")
    export_checkpoint(MergedParams(saved, decoder), plain, folder / "merged", original=original)  # pyright: ignore
    params = jax.tree.map(jnp.asarray, from_huggingface(load_file(folder / "merged" / "model.safetensors"), plain))  # pyright: ignore
    graphdef, _ = split(build_abstract(plain))
    tokens = jnp.asarray(arrays["tokens"])[None]
    context = PackedContext(jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
    logits = jax.jit(lambda p: bind(graphdef, p)(tokens, context))(params)[0]
    np.testing.assert_allclose(np.asarray(logits), arrays["logits"], atol=5e-5)
    export_adapter(saved, decoder, folder / "back")  # pyright: ignore
    back = load_file(folder / "back" / "adapter_model.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)
    if any("magnitude" in name for name in tensors):
        with pytest.raises(UserError, match=r"magnitudes \(DoRA\) .* cannot be adapted row by row"):
            adapter_of(decoder, restore_params(folder / "run"))  # pyright: ignore


def test_another_base_is_refused_by_tensor(tmp_path):
    folder = tmp_path
    tensors, _ = made(folder, "peft_llama")
    path = folder / "adapter" / "adapter_model.safetensors"
    name = next(name for name in tensors if "layers.1" in name and "lora_A" in name)
    save_file({**tensors, name: tensors[name][:, :-1].copy()}, path)
    base = HuggingFaceDirectory.open(folder / "base")
    with pytest.raises(ConversionError, match=rf"{folder}/adapter: .*{name} is \(3, \d+\); expected \(3, "):
        with_adapter(base, folder / "adapter")
    save_file({other: x for other, x in tensors.items() if other != name}, path)
    with pytest.raises(ConversionError, match=f"missing: .*{name}"):
        with_adapter(base, folder / "adapter")
