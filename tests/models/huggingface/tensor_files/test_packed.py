"""Matrices of 4 and 8 bits: read as transformers reads them, every tensor once, and written as bfloat16."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.arrays import SavedParams
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.config import from_text
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.attention.rope import InterleavedRope, Rope
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SigmoidRouter
from models.deepseek import latent_mixture
from models.gpt_oss import sink_mixture
from models.huggingface import hf_weights
from models.huggingface.architectures import same_function
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.exporting import Original, export_checkpoint
from models.huggingface.checkpoints.importing import import_checkpoint
from models.huggingface.convert import abstract_params, by_name, from_huggingface
from models.huggingface.rows import ConversionError
from models.huggingface.tensor_files.packed import Fp8Matrix, Mxfp4Matrices
from models.huggingface.tensor_files.safetensors import read_header
from tests.models.huggingface.checkpoints.made import dense_model, make, write
from tests.models.huggingface.test_convert import GOLDEN

BLOCK = [16, 24]
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def gpt_oss_model():
    return sink_mixture(
        vocab_size=37,
        dim=64,
        hidden=32,
        num_layers=2,
        heads=(4, 2, 16),
        num_experts=2,
        top_k=1,
        rope=Rope.Config(theta=1e4, max_length=64),
        window=8,
    )


def deepseek_model():
    rope = InterleavedRope.Config(theta=1e4, max_length=64)
    attention = LatentAttention.Config(
        num_heads=2, q_rank=20, kv_rank=12, nope_dim=8, rope_dim=4, value_dim=8, rope=rope
    )
    router = SigmoidRouter.Config(top_k=2, groups=1, groups_kept=1)
    experts = MoE.Config(num_experts=3, router=router, experts=Experts.Config(hidden=20))
    return latent_mixture(
        vocab_size=37, dim=40, hidden=28, num_layers=2, num_dense=1, attention=attention, feed_forward=experts
    )


def four_bits(blocks, scales):
    """Numbers [matrices, in, out] of MXFP4, one by one."""
    found = np.zeros((*blocks.shape[:2], blocks.shape[2], 32), np.float32)
    for place in np.ndindex(blocks.shape):
        for half, nibble in enumerate((int(blocks[place]) & 15, int(blocks[place]) >> 4)):
            sign = -1.0 if nibble & 8 else 1.0
            scale = 2.0 ** (int(scales[place[:3]]) - 127)
            found[(*place[:3], 2 * place[3] + half)] = sign * NUMBERS[nibble & 7] * scale
    return found.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


def eight_bits(values, factors):
    """Numbers of a float8 matrix."""
    found = np.empty(values.shape, np.float32)
    for row, column in np.ndindex(values.shape):
        found[row, column] = np.float32(values[row, column]) * factors[row // BLOCK[0], column // BLOCK[1]]
    return found.astype(jnp.bfloat16)


def packed(folder: Path, kind: str):
    """Write a packed directory; returns its config, its tensors, and those as transformers would have them."""
    rng = np.random.default_rng(1)
    cfg = gpt_oss_model() if kind == "mxfp4" else deepseek_model()
    plain = make(folder, cfg)
    held = dict(plain)
    for name, tensor in list(plain.items()):
        if kind == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            held[f"{name}_blocks"] = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
            held[f"{name}_scales"] = rng.integers(118, 130, (experts, outputs, inputs // 32), np.uint8)
            plain[name] = four_bits(held[f"{name}_blocks"], held[f"{name}_scales"]).astype(jnp.bfloat16)
            del held[name]
        elif kind == "fp8" and tensor.ndim == 2 and "layers" in name and "mlp.gate.weight" not in name:
            grid = [-(-size // block) for size, block in zip(tensor.shape, BLOCK, strict=True)]
            held[name] = tensor.astype(jnp.float8_e4m3fn)
            held[f"{name}_scale_inv"] = np.exp(rng.normal(-4, 1, grid)).astype(np.float32)
            plain[name] = eight_bits(held[name], held[f"{name}_scale_inv"])
    fields = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    if kind == "fp8":
        quantised = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCK}
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": quantised}))
    write(folder, held, files=2)
    (folder / "model.safetensors").unlink()
    return cfg, held, plain


def test_numbers_are_those_of_transformers(tmp_path):
    """The file of tests/golden/packed_tensors.py has subnormal and infinite ones too."""
    with np.load(GOLDEN / "packed_tensors.npz") as file:
        golden = dict(file)
    held = {name: golden[name] for name in ("blocks", "scales", "factors")}
    write(tmp_path, {**held, "values": golden["values"].view(jnp.float8_e4m3fn)})
    found = read_header(tmp_path / "model.safetensors")
    four = Mxfp4Matrices("x", found["blocks"], found["scales"]).rows(0, 2)
    np.testing.assert_array_equal(four.view(np.uint16), golden["mxfp4"].swapaxes(1, 2))
    eight = Fp8Matrix("x", found["values"], found["factors"], (16, 32))
    np.testing.assert_array_equal(eight.rows(0, 48).view(np.uint16), golden["fp8"])
    np.testing.assert_array_equal(eight.rows(15, 33).view(np.uint16), golden["fp8"][15:33])


@pytest.mark.parametrize("kind", ["mxfp4", pytest.param("fp8", marks=pytest.mark.full)])
def test_an_import_has_the_numbers_and_an_export_writes_bfloat16(tmp_path, kind):
    cfg, held, plain = packed(tmp_path / "hf", kind)
    source = HuggingFaceDirectory.open(tmp_path / "hf")
    assert set(source.expected) == set(source.tensors) == set(plain) and len(held) > len(plain)
    import_checkpoint(source, tmp_path / "run", chunk_bytes=9000)
    wanted = by_name(from_huggingface(plain, cfg))
    ours = by_name(restore_params(tmp_path / "run"))
    read = by_name(hf_weights(tmp_path / "hf").build().params(abstract_params(cfg)))  # without an import
    assert ours.keys() == wanted.keys() == read.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(ours[name].astype(np.float32), array, err_msg=name)
        np.testing.assert_array_equal(np.asarray(read[name]), array, err_msg=name)
    decoder = from_text((tmp_path / "run" / "config.txt").read_text())
    export_checkpoint(SavedParams(tmp_path / "run"), decoder, tmp_path / "back", original=Original.of(tmp_path / "run"))  # pyright: ignore
    back = HuggingFaceDirectory.open(tmp_path / "back").tensors
    assert {tensor.dtype for tensor in back.values()} == {"BF16"}
    for name, tensor in plain.items():
        np.testing.assert_array_equal(back[name].rows(0, len(tensor)), tensor, err_msg=name)
    fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {
        name: value for name, value in fields.items() if name != "quantization_config"
    }


EXPERTS = "model.layers.0.mlp.experts.down_proj"
MATRIX = "model.layers.1.self_attn.o_proj.weight"
BAD = {
    "mxfp4, no scales": ("mxfp4", lambda x: x.pop(f"{EXPERTS}_scales"), f"{EXPERTS}_scales: expected U8 .*no such"),
    "mxfp4, scales of another shape": (
        "mxfp4",
        lambda x: x.update({f"{EXPERTS}_scales": x[f"{EXPERTS}_scales"][:, :1]}),
        rf"{EXPERTS}_scales: expected U8 \[2, 64, 1\], one for each block .*got U8 \[2, 1, 1\]",
    ),
    "mxfp4, blocks of another size": (
        "mxfp4",
        lambda x: x.update({f"{EXPERTS}_blocks": x[f"{EXPERTS}_blocks"][..., :8]}),
        rf"{EXPERTS}_blocks: expected U8 \[matrices, out, blocks, 16\], got U8 \[2, 64, 1, 8\]",
    ),
    "mxfp4, a scale that is not a number": (
        "mxfp4",
        lambda x: x[f"{EXPERTS}_scales"].__setitem__((1, 2, 0), 255),
        f"{EXPERTS}_scales: expected scales of 0 to 254, got 255",
    ),
    "mxfp4, one layer as it is": (
        "mxfp4",
        lambda x: x.update({EXPERTS: np.zeros((2, 32, 64), jnp.bfloat16)}),
        f"the file has both {EXPERTS} and {EXPERTS}_blocks",
    ),
    "mxfp4, scales alone": (
        "mxfp4",
        lambda x: (x.pop(f"{EXPERTS}_blocks"), x.update({EXPERTS: np.zeros((2, 32, 64), jnp.bfloat16)})),
        f"unknown: {EXPERTS}_scales",
    ),
    "fp8, no scales": ("fp8", lambda x: x.pop(f"{MATRIX}_scale_inv"), f"{MATRIX}_scale_inv: expected F32 .*no such"),
    "fp8, scales of another shape": (
        "fp8",
        lambda x: x.update({f"{MATRIX}_scale_inv": np.ones((1, 1), np.float32)}),
        rf"{MATRIX}_scale_inv: expected F32 or BF16 \[3, 1\], one for each 16 x 24 .*got F32 \[1, 1\]",
    ),
    "fp8, numbers that are not packed, with scales": (
        "fp8",
        lambda x: x.update({MATRIX: x[MATRIX].astype(jnp.bfloat16)}),
        f"unknown: {MATRIX}_scale_inv",
    ),
}


EVERY_RUN = ("mxfp4, a scale that is not a number", "fp8, no scales", "fp8, scales of another shape")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in EVERY_RUN else [pytest.mark.full]) for case in BAD]
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, case):
    kind, spoil, message = BAD[case]
    _, held, _ = packed(tmp_path / "hf", kind)
    spoil(held)
    write(tmp_path / "hf", held, files=2)
    with pytest.raises(ConversionError, match=message):
        import_checkpoint(HuggingFaceDirectory.open(tmp_path / "hf"), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_other_forms_are_refused_by_field(tmp_path):
    packed(tmp_path / "hf", "fp8")
    config = tmp_path / "hf" / "config.json"
    fields = json.loads(config.read_text())
    for change, message in (
        ({"quant_method": None}, "quant_method: expected a string, got nothing"),
        ({"fmt": "e5m2"}, "fmt: expected 'e4m3', got 'e5m2'"),
        ({"weight_block_size": [0, 8]}, r"weight_block_size: expected two sizes, such as \[128, 128\], got \[0, 8\]"),
    ):
        quantised = {**fields["quantization_config"], **change}
        config.write_text(json.dumps({**fields, "quantization_config": quantised}))
        with pytest.raises(ConversionError.__base__, match=message):  # pyright: ignore
            HuggingFaceDirectory.open(tmp_path / "hf")


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "compressed-tensors", "fp8", "mxfp4"])
def test_what_is_left_in_the_config_of_a_model_whose_tensors_are_floats_changes_nothing(tmp_path, method):
    cfg = dense_model()
    tensors = make(tmp_path / "hf", cfg)
    leave(tmp_path / "hf", {"quant_method": method, "load_in_4bit": True})
    directory = HuggingFaceDirectory.open(tmp_path / "hf")
    assert same_function(directory.decoder, cfg) and directory.expected.keys() == tensors.keys()
    assert any(method in note for note in directory.notes) == (method not in ("fp8", "mxfp4"))
    import_checkpoint(directory, tmp_path / "run")
    export_checkpoint(SavedParams(tmp_path / "run"), cfg, tmp_path / "back", original=Original.of(tmp_path / "run"))  # pyright: ignore
    for name, stored in HuggingFaceDirectory.open(tmp_path / "back").tensors.items():
        np.testing.assert_array_equal(stored.map(), tensors[name], err_msg=name)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_matrices_of_bitsandbytes_are_refused_with_the_reason(tmp_path):
    tensors = make(tmp_path / "hf", dense_model())
    name = "model.layers.1.mlp.up_proj.weight"
    packed_up = {f"{name}.absmax": np.ones(6, np.uint8), name: np.ones((tensors[name].size // 2, 1), np.uint8)}
    write(tmp_path / "hf", {**tensors, **packed_up})
    leave(tmp_path / "hf", {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ConversionError, match=rf"held as 'bitsandbytes' does .* With transformers: .* {name}"):
        HuggingFaceDirectory.open(tmp_path / "hf")


def leave(folder, quantised):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantised}))


def test_layers_behind_the_models_own_that_its_config_counts_are_left_out(tmp_path):
    tensors = make(tmp_path / "hf", deepseek_model())  # 2 layers
    path = tmp_path / "hf" / "config.json"
    fields = {key: value for key, value in json.loads(path.read_text()).items() if key != "num_nextn_predict_layers"}
    more = {f"model.layers.2.{name}": np.ones((2, 2), np.float32) for name in ("eh_proj.weight", "mlp.gate.weight")}
    write(tmp_path / "hf", {**tensors, **more})
    for counted in ({}, {"num_nextn_predict_layers": 1}, {"num_mtp_layers": 1}):  # one, by default
        path.write_text(json.dumps({**fields, **counted}))
        directory = HuggingFaceDirectory.open(tmp_path / "hf")
        assert directory.expected.keys() == tensors.keys()
    import_checkpoint(directory, tmp_path / "run")
    assert by_name(restore_params(tmp_path / "run")).keys() == by_name(abstract_params(deepseek_model())).keys()
    export_checkpoint(  # whose config counts none
        SavedParams(tmp_path / "run"),
        deepseek_model(),
        tmp_path / "back",
        original=Original.of(tmp_path / "run"),  # pyright: ignore[reportArgumentType]
    )
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {**fields, "num_mtp_layers": 0}
    # A model cut short is not one with layers that predict.
    path.write_text(json.dumps({**fields, "num_nextn_predict_layers": 0}))
    with pytest.raises(ConversionError, match=r"unknown: model\.layers\.2\.eh_proj\.weight"):
        HuggingFaceDirectory.open(tmp_path / "hf")
