"""Small directories in Hugging Face's form, made for the tests."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from models.dense import dense
from models.huggingface.architectures import config_json
from models.huggingface.convert import expected_tensors
from models.huggingface.tensor_files.safetensors import DTYPES, SafetensorsWriter
from models.moe import mixture

SHAPE: dict[str, Any] = {
    "vocab_size": 37,
    "dim": 16,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "theta": 1e4,
    "eps": 1e-6,
    "max_length": 64,
}


def dense_model(tied: bool = False) -> Decoder.Config:
    return dense(hidden=24, qkv_bias=True, tied=tied, **SHAPE)


def mixture_model() -> Decoder.Config:
    router, experts = SoftmaxRouter.Config(top_k=2), Experts.Config(hidden=12)
    return mixture(MoE.Config(num_experts=3, router=router, experts=experts), qk_norm=True, tied=True, **SHAPE)


def make(
    folder: Path, cfg: Decoder.Config, dtype: str = "BF16", files: int = 1, **dtypes: str
) -> dict[str, np.ndarray]:
    """Write a directory with tensors of one dtype, but for those named with another; returns the tensors."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    kinds = {name: dtypes.get(name.rpartition(".")[2], dtype) for name in expected_tensors(cfg)}
    tensors = {
        name: rng.standard_normal(tensor.shape, np.float32).astype(DTYPES[kinds[name]])
        for name, tensor in expected_tensors(cfg).items()
    }
    fields = config_json(cfg, {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}[dtype], eos_token_id=3)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))  # not the spaces of an export
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2, "end": 3}, "unk_token": "a"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    write(folder, tensors, files)
    return tensors


def write(folder: Path, tensors: dict[str, np.ndarray], files: int = 1) -> None:
    """Write the tensors in one file, or in several with an index."""
    codes = {jnp.dtype(kind): code for code, kind in DTYPES.items()}
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(files):
        file = "model.safetensors" if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        own = names[number::files]
        with SafetensorsWriter(folder / file, {n: (codes[tensors[n].dtype], tensors[n].shape) for n in own}) as out:
            for name in own:
                out.write(name, tensors[name])
        weight_map |= dict.fromkeys(own, file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
