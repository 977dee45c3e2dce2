"""Generations of TPUs that the table lacks: described by their user, in text, as configs and commands carry it."""

import pytest

from mesh import UserError
from mesh.generations import describe_generation
from mesh.topology import parse_topology


def test_a_generation_of_which_nothing_is_known_here_is_described_in_the_topology():
    found = parse_topology("v9x[memory=64;host=4;devices=2]:2x2x4", slices=3)
    assert (found.name, str(found)) == ("v9x:2x2x4", "3 x v9x:2x2x4")
    assert (found.devices, found.hosts) == (96, 12)
    generation = found.generation
    assert generation.per_device(generation.hbm) == 32 << 30
    assert parse_topology(found.text, slices=3) == found, "it travels as text"
    assert parse_topology("v9x[memory=64]:1x2").hosts == 1, "a part of a machine"
    assert parse_topology("v9x[memory=95.5; host=8]:4x4").hosts == 2
    assert describe_generation("v9x", {"memory": 64, "shown": "TPU v9 lite"}).shown == "tpu-v9-lite"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9x:2x2", r"no TPU generation 'v9x'.*another is described: v9x\[memory=64;host=4\]:2x2x4"),
        ("v9x[]:2x2", "'v9x': expected memory=NUMBER"),
        ("v9x[memory=much]:2x2", "expected memory=NUMBER, got 'much'"),
        ("v9x[memory=64;host=0]:2x2", "expected host=NUMBER, got '0'"),
        ("v9x[memory=64;host=2.5]:2x2", "expected whole numbers of host=2.5"),
        ("v9x[memory=64;hots=2]:2x2", "no fact 'hots'; did you mean 'host'"),
        ("v9x[memory=64;shown=a,b]:2x2", "expected shown as jax names a device, got 'a,b'"),
        ("v9x[memory=64]:3x2", r"6 chips are no machines of 4 \(host=4\)"),
        ("v9x[memory=64]:0x2", "0 chips are no machines"),
        ("v9x[memory=64]-8", "the shape of a described generation is given"),
        ("v5p[memory=64]:2x2x1", "'v5p' is in the table"),
        ("ironwood[memory=64]:2x2x1", "'ironwood' is in the table"),
    ],
)
def test_what_is_said_of_it_must_be_enough_and_true_to_itself(text: str, message: str):
    with pytest.raises(UserError, match=message):
        parse_topology(text)
