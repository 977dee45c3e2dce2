"""Models whose files would take all time or memory, or never end, for `tests.measured`."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.importing_adapter import peft_adapter
from models.huggingface.policy import hf
from tests.measured import Cases
from tests.models.huggingface.checkpoints.made import dense_model, make, mixture_model

_MADE = Path(tempfile.gettempdir()) / f"hostile-models-{os.getpid()}"
_HUGE = (10**9, 2**31 - 1, 10**30)


def prepare() -> None:
    """Make and open one of each kind, so that cases are charged for no import."""
    _MADE.mkdir()
    for name, cfg in (("dense", dense_model()), ("mixture", mixture_model())):
        make(_MADE / name, cfg)
        HuggingFaceDirectory.open(_MADE / name)
        hf(_MADE / name)


def finish() -> None:
    """Remove them."""
    shutil.rmtree(_MADE)


def _open(kind: str, damage: Callable[[Path], object], folder: Path) -> None:
    shutil.copytree(_MADE / kind, folder / "hf")
    damage(folder / "hf")
    HuggingFaceDirectory.open(folder / "hf")


def _fields(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _replaced(name: str, put: Callable[[Path], object], folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    put(folder / name)


def _sparse(size: int, path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


def _header(text: str | Callable[[], str], path: Path) -> None:
    text = text if isinstance(text, str) else text()
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())


def _million_tensors() -> str:
    return "{" + ", ".join(f'"t{i}": {{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(10**6)) + "}"


def _tensor(**fields: Any) -> str:
    return json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}})


def _of_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


PLACES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to a device": _of_device,
    "a directory": lambda path: path.mkdir(),
    "ten sparse gigabytes": partial(_sparse, 10**10),
    "deep JSON": lambda path: path.write_text("[" * 200_000),
    "many empty lists": lambda path: path.write_text("[" + "[]," * 5_000_000 + "[]]"),
    "no UTF-8": lambda path: path.write_bytes(b'{"a": "\xff"}'),
    "a number of 5,000 digits": lambda path: path.write_text('{"hidden_size": ' + "9" * 5000 + "}"),
}
_HEADERS: dict[str, str | Callable[[], str]] = {
    "a long shape": _tensor(shape=[10**9] * 80_000),
    "a long shape of ones": _tensor(shape=[1] * 400_000),
    "numbers of 4,000 digits": _tensor(shape=[10**4000, 10**4000]),
    "offsets of 4,000 digits": _tensor(data_offsets=[0, 10**4000]),
    "a huge axis beside an empty one": _tensor(shape=[2**62, 0], data_offsets=[0, 0]),
    "100 dimensions": _tensor(shape=[1] * 100),
    "100 empty dimensions": _tensor(shape=[0] * 100, data_offsets=[0, 0]),
    "a million empty tensors": _million_tensors,
    "a million objects": '{"a": [' + "{}," * 10**6 + "{}]}",
    "a deep header": "[" * 200_000,
    "a deep shape": '{"x": {"dtype": "F32", "shape": ' + "[" * 50_000 + "]" * 50_000 + ', "data_offsets": [0, 4]}}',
    "not a number": _tensor(shape=[math.nan]),
    "infinite offsets": _tensor(data_offsets=[0, math.inf]),
    "names alike": '{"__metadata__": {' + ", ".join(['"a": 1'] * 200_000) + "}}",
    "a long dtype": _tensor(dtype="F" * 500_000),
    "a list as dtype": _tensor(dtype=["F32"]),
    "a name of control characters": json.dumps({"\x1b]0;x\x07": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}),
}
_SIZES = {
    "dense": ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_hidden_layers", "vocab_size"),
    "mixture": ("num_experts", "moe_intermediate_size", "num_experts_per_tok", "head_dim", "num_hidden_layers"),
}
_ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
_ADAPTERS: dict[str, Any] = {
    "a huge rank": {"r": 10**9},
    "a rank of 400 digits": {"r": 10**400},
    "an infinite alpha": {"lora_alpha": math.inf},
    "patterns of ranks": {"rank_pattern": {"(a+)+$" * 1000: 3}},
    "patterns as a list": {"rank_pattern": [1]},
    "parameters as a number": {"target_parameters": 3},
}


def _imported(name: str, put: Callable[[Path], object], folder: Path) -> None:
    """Name a directory that `axl convert import` made, of which one file was replaced."""
    (folder / "import.json").write_text("{}")
    (folder / "config.txt").write_text("axlearn_like.layers.decoder:Decoder\n")
    _replaced(name, put, folder)
    hf(folder)


def _adapter(fields: dict[str, Any], folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({**_ADAPTER, **fields}))
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB"]
    entries = {names[0]: ([2, 16], [0, 128]), names[1]: ([32, 2], [128, 384])}
    text = json.dumps({name: {"dtype": "F32", "shape": s, "data_offsets": o} for name, (s, o) in entries.items()})
    _header(text, folder / "adapter_model.safetensors")
    with open(folder / "adapter_model.safetensors", "ab") as file:
        file.write(bytes(384))
    peft_adapter(folder, dense_model())


CASES: Cases = {
    **{
        f"{name}={value}": partial(_open, kind, lambda folder, n=name, v=value: _fields(folder, **{n: v}))
        for kind, names in _SIZES.items()
        for name in names
        for value in _HUGE
    },
    "as many layers as may be": partial(_open, "dense", lambda folder: _fields(folder, num_hidden_layers=2000)),
    "as wide a head as may be": partial(_open, "dense", lambda folder: _fields(folder, head_dim=16384)),
    "as many experts as may be": partial(_open, "mixture", lambda folder: _fields(folder, num_experts=16384)),
    "a head as wide as the model": partial(
        _open, "dense", lambda folder: _fields(folder, hidden_size=10**9, num_attention_heads=2, head_dim=None)
    ),
    **{
        f"{file} is {name}": partial(_open, "dense", partial(_replaced, file, put))
        for file in ("config.json", "model.safetensors.index.json")
        for name, put in PLACES.items()
        if file == "config.json" or name not in ("a pipe", "a link to a device", "a directory")
    },
    **{
        f"a header with {name}": partial(
            _open, "dense", partial(_replaced, "model.safetensors", partial(_header, text))
        )
        for name, text in _HEADERS.items()
    },
    **{f"the config of an import is {name}": partial(_imported, "config.txt", put) for name, put in PLACES.items()},
    **{f"an adapter with {name}": partial(_adapter, fields) for name, fields in _ADAPTERS.items()},
}
