"""Names of TPU slices: which there are, how many devices they have, and what is said of those that there are not."""

import importlib.util

import pytest

from mesh import UserError
from mesh.generations import GENERATIONS, generation_of
from mesh.topology import find_compiler, parse_topology, prepare_compiler


@pytest.mark.parametrize(
    ("text", "name", "sold_as", "devices"),
    [
        ("v5p:2x2x1", "v5p:2x2x1", "v5p-8", 4),  # cores are counted
        ("v5p:8x8x16", "v5p:8x8x16", "v5p-2048", 1024),
        ("v5p-32", "v5p:2x2x4", "v5p-32", 16),
        ("v5p-256", "v5p:4x4x8", "v5p-256", 128),
        ("v4-8", "v4:2x2x1", "v4-8", 4),  # one device for both cores
        ("v5e-16", "v5e:4x4", "v5e-16", 16),  # chips are counted
        ("v5litepod-16", "v5e:4x4", "v5e-16", 16),
        ("v6e:16x16", "v6e:16x16", "v6e-256", 256),
        ("v6e-1", "v6e:1x1", "v6e-1", 1),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", "tpu7x-8", 8),  # two devices to a chip
        ("V7X:4x4x4", "tpu7x:4x4x4", "tpu7x-128", 128),
    ],
)
def test_names_are_read_with_cores_or_chips_as_they_are_sold(text, name, sold_as, devices):
    topology = parse_topology(text)
    assert (topology.name, topology.sold_as, topology.devices) == (name, sold_as, devices)
    assert parse_topology(sold_as).devices == devices  # of another form, perhaps, but as large
    assert parse_topology(text, slices=3).devices == 3 * devices


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v5p:3x3x3", ["no TPU topology 'v5p:3x3x3'", "the nearest: v5p:2x4x4"]),
        ("v6e:16x32", ["the nearest: v6e:16x16"]),
        ("v6e:4x4x4", ["the nearest: v6e:8x8"]),
        ("v5p:16x20x32", ["the nearest: v5p:16x20x28"]),
        ("v5p-100", ["the number counts TensorCores, two to a chip", "v5p-64", "v5p-128"]),
        ("v6e-100", ["the number counts chips", "v6e-128"]),
        ("v9:2x2", ["no TPU generation 'v9'", "known: tpu7x, v4, v5e, v5p, v6e"]),
        ("v5p", ["expected generation and chips", "v5p:2x2x1"]),
        ("v5p:", ["expected generation and chips"]),
    ],
)
def test_a_topology_that_does_not_exist_is_refused_with_the_nearest(text, expected):
    with pytest.raises(UserError) as refusal:
        parse_topology(text)
    assert all(words in str(refusal.value) for words in expected), refusal.value


def test_slices_are_counted_from_one():
    with pytest.raises(UserError, match="--slices 0: expected 1 or more"):
        parse_topology("v6e:4x4", slices=0)


def test_the_peak_is_that_of_matrix_units_at_the_stated_clock():
    """The clock turns the compiler's cycles into seconds; units by cloud.google.com/tpu/docs, from v6e on 256 wide."""
    units = {"v4": 8 * 128**2, "v5e": 4 * 128**2, "v5p": 8 * 128**2, "v6e": 4 * 256**2, "tpu7x": 8 * 256**2}
    for name, generation in GENERATIONS.items():
        assert generation.flops == pytest.approx(2 * units[name] * generation.clock, rel=0.01), name


def test_the_generation_of_a_device_follows_from_its_kind():
    class Device:
        def __init__(self, kind: str):
            self.device_kind = kind

    kinds = {"TPU v4": "v4", "TPU v5": "v5p", "TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
    for kind, name in kinds.items():
        found = generation_of(Device(kind))
        assert found is not None and found.name == name
    assert generation_of(Device("cpu")) is None


def test_without_the_compiler_it_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(UserError, match=r"libtpu.*not installed.*pip install .*\[aot\]"):
        prepare_compiler()
    aside = tmp_path / "libtpu" / "libtpu" / "libtpu.so"
    aside.parent.mkdir(parents=True)
    aside.write_bytes(b"")
    assert find_compiler() == aside  # where the development installation puts it
