"""States of models on disk: the same bits back, damage and other bases refused."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from axlearn_like.layers.wrappers.adapters import Factors
from rl.serving.service.messages import LoraSpec, ServiceError
from rl.serving.service.saved import SlotState, read_state, write_state
from tests.rl.serving.service.small import assert_same_state, make_slots

pytestmark = pytest.mark.numerics


def make_state(spec: LoraSpec, *, moments: bool = True) -> SlotState:
    """Return a state of random numbers, made of what a new model has."""
    slots, rng = make_slots(), np.random.default_rng(spec.seed)
    slots.create("one", spec)
    factors = dict(slots.state("one").factors)

    def drawn() -> dict[str, Factors]:
        return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), factors)

    state = SlotState(spec, 7, drawn())
    return dataclasses.replace(state, first=drawn(), second=drawn(), gradients=drawn()) if moments else state


@pytest.fixture(scope="module")
def state() -> SlotState:
    return make_state(LoraSpec(3, seed=1, train_mlp=False))


def test_a_state_comes_back_to_the_bit_with_its_notes(tmp_path: Path, state: SlotState):
    file = tmp_path / "folder" / "a.safetensors"
    write_state(file, state, {"seq": 12, "name": "first"}, base="tiny")
    found, notes = read_state(file, base="tiny")
    assert_same_state(found, state)
    assert notes == {"seq": 12, "name": "first"}
    written = file.read_bytes()
    for _ in range(8):
        write_state(file, state, {"seq": 12, "name": "first"}, base="tiny")
        assert file.read_bytes() == written, "equal states are equal files"
    write_state(file, state, base="tiny", optimizer=False)
    found, notes = read_state(file)
    assert_same_state(found, SlotState(state.spec, 0, state.factors))
    assert notes == {} and [path.name for path in file.parent.iterdir()] == [file.name]


def test_other_programs_read_the_arrays(tmp_path: Path, state: SlotState):
    file = tmp_path / "a.safetensors"
    write_state(file, state)
    arrays = load_file(file)
    assert len(arrays) == 4 * 2 * len(state.factors)
    for path, (a, b) in state.factors.items():
        np.testing.assert_array_equal(arrays[f"factors/{path}/a"], a)
        np.testing.assert_array_equal(arrays[f"factors/{path}/b"], b)


def test_damage_is_refused_wherever_it_is(tmp_path: Path, state: SlotState):
    file = tmp_path / "a.safetensors"
    write_state(file, state, {"seq": 1})
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    text = content[8:end].rstrip(b" ")
    rng = np.random.default_rng(0)
    places = [0, 7, *rng.integers(8, 8 + len(text), 60), *rng.integers(end, len(content), 20), len(content) - 1]
    for place in map(int, places):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ServiceError, match=r"a\.safetensors is damaged") as caught:
            read_state(file)
        assert caught.value.category == "server"
    for cut in (0, 5, 100, end, len(content) - 4):
        file.write_bytes(content[:cut])
        with pytest.raises(ServiceError, match="damaged"):
            read_state(file)


def test_a_state_of_another_base_is_refused_with_both_names(tmp_path: Path, state: SlotState):
    write_state(tmp_path / "a", state, base="small")
    with pytest.raises(ServiceError, match="the base 'small'; this service trains 'large'"):
        read_state(tmp_path / "a", base="large")
    with pytest.raises(FileNotFoundError):
        read_state(tmp_path / "b")


def test_remains_of_a_killed_writer_do_not_matter(tmp_path: Path, state: SlotState):
    file = tmp_path / "a.safetensors"
    write_state(file, state)
    file.with_name("a.safetensors.half").write_bytes(b"half of a sta")
    assert_same_state(read_state(file)[0], state)
    other = dataclasses.replace(state, step=8)
    write_state(file, other)
    assert_same_state(read_state(file)[0], other)
