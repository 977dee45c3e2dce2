"""Hostile models are refused with a sentence, within a second and 200 MB; what is large and well formed is not."""

import json
import os
from pathlib import Path

import pytest

from models.huggingface.tensor_files.safetensors import read_header
from tests.measured import check, measured
from tests.models.huggingface.checkpoints import hostile_models


@pytest.mark.slow
def test_every_hostile_model_is_refused() -> None:
    found = measured(hostile_models.__name__)
    assert len(found) == len(hostile_models.CASES) > 60
    check(found)


@pytest.mark.slow
def test_a_header_of_many_tensors_is_read(tmp_path: Path) -> None:
    """A third of what all files of the largest models hold, in one file."""
    header = {
        f"model.layers.{i}.weight": {"dtype": "BF16", "shape": [0, 7], "data_offsets": [0, 0]} for i in range(50_000)
    }
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    found = read_header(tmp_path / "x.safetensors")
    assert len(found) == 50_000 and found["model.layers.7.weight"].map().shape == (0, 7)


def test_an_adapter_within_the_bounds_is_read_as_far_as_its_tensors(tmp_path: Path) -> None:
    """The file of the hostile adapters is otherwise one of a model's first layer."""
    with pytest.raises(Exception, match=r"unknown: \[\], missing: .*layers\.1\.self_attn\.q_proj\.lora_A"):
        hostile_models._adapter({}, tmp_path)
    assert os.path.exists(tmp_path / "adapter_config.json")
