"""A tiny model in Hugging Face's form, rows, and a reward, in a folder that is the current one."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from flax import nnx
from safetensors.numpy import save_file

from axlearn_like.config import trusted_code
from axlearn_like.layers.base import split
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from models.huggingface.architectures import config_json
from models.huggingface.convert import to_huggingface
from models.tiny import tiny
from tests.axlearn_like.tokenizers.kinds import directory

REWARD = """\
def score(answer, reference):
    if answer == reference:
        return 1.0
    return 0.25 * (len(answer.strip()) == len(reference))
"""


def write_model(path: Path, *, max_length: int = 96, **fields: Any) -> Path:
    """Write a random model of one layer with the tokenizer of the tests; return its directory."""
    shutil.copytree(directory("byte_level"), path)
    built = HuggingFaceTokenizer.Config(path=str(path)).build()
    sizes: dict[str, Any] = {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "hidden": 48} | fields
    model = tiny(vocab_size=built.vocab_size, **sizes)
    model.block.attention.rope.max_length = max_length  # pyright: ignore[reportAttributeAccessIssue]
    params = split(model.build(rngs=nnx.Rngs(0)))[1]
    save_file(to_huggingface(params, model), path / "model.safetensors")
    fields = config_json(model, eos_token_id=built.eos)
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def model(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the model in the current folder, beside rows.jsonl and reward.py; other tests' files are forgotten."""
    monkeypatch.setattr(trusted_code, "_files", {})
    monkeypatch.setenv(trusted_code.VARIABLE, "tests")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    shutil.copytree(written, "small")
    Path("reward.py").write_text(REWARD)
    write_lines(
        Path("rows.jsonl"),
        *({"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(6) for b in range(6)),
    )
    yield Path("small")
    for name in ("mine", "reward"):
        sys.modules.pop(name, None)


def write_lines(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
