"""Arrays that the backward pass finds stored, by the memory that is left."""

import dataclasses

import pytest

from experiments.recipes.device_rules import H100, V5P, Fit, pretraining_rules
from experiments.recipes.kept import STORED, remat_by_memory
from experiments.recipes.sizes import TrainingWay, model_sizes, training_bytes
from models.llama import llama
from models.moe import moe

MIXTURE, DENSE = moe("Qwen3-30B-A3B"), llama("Llama-2-7B")
WAY = TrainingWay("sft", "full", 64, 1, 1, 8 * 4096, 8 * 4096, keeps=False, accumulated=True)


def test_what_saves_most_seconds_for_a_byte_comes_first_and_no_more_than_fits():
    sizes = model_sizes(MIXTURE)
    bare = sum(training_bytes(sizes, WAY).values())
    each = 2 * sizes.layers * WAY.tokens  # bytes of one number of a token and layer
    widths = {"context": sizes.context, "attention_out": sizes.dim, "gate": sizes.hidden, "up": sizes.hidden}
    room, names = bare, ["routing"]
    assert remat_by_memory(sizes, WAY, 4096, (room + 1) / STORED) == dict.fromkeys(names, "save")
    for name, width in widths.items():
        short = remat_by_memory(sizes, WAY, 4096, (room + each * width - 1) / STORED)
        room, names = room + each * width, [*names, name]
        found = remat_by_memory(sizes, WAY, 4096, (room + 1) / STORED)
        assert list(found) == names and list(short) != names


def test_a_narrow_array_is_stored_where_a_wide_one_that_is_worth_more_has_no_room():
    sizes = dataclasses.replace(model_sizes(MIXTURE), context=1 << 20)
    found = remat_by_memory(sizes, WAY, 1 << 20, 1.5 * sum(training_bytes(sizes, WAY).values()))
    assert "context" not in found and "attention_out" in found


def test_rules_store_more_where_devices_are_more_and_dense_models_have_no_routing():
    fit = Fit((V5P,), 16, None, rows=4, largest=32)
    few, many, _ = (edits["model.remat"] for _, edits in pretraining_rules(1024, fit, model=MIXTURE, length=4096))
    assert set(few) < set(many) and "up" in many
    dense, _ = pretraining_rules(256, Fit((V5P,), 16, None, largest=16), model=DENSE, length=4096)
    assert "routing" not in dense[1]["model.remat"] and "context" in dense[1]["model.remat"]


def test_gpus_have_no_figures_for_it():
    with pytest.raises(ValueError, match=r"Fit.*gpu-nvidia-h100.*remat of its own"):
        pretraining_rules(64, Fit((H100,), 8, None), model=DENSE, length=4096)
