"""Devices of a role by their text: kind and number as mesh rules know them, hosts as clouds sell them."""

import pytest

from mesh import UserError
from mesh.devices import find_devices
from rl.fleet.devices import HERE, parse_count, parse_devices


@pytest.mark.parametrize(
    ("text", "slices", "name", "chips", "hosts"),
    [
        # Hosts: cloud.google.com/tpu/docs/v5p, /v5e, /v6e and /tpu7x
        ("v5p:2x2x1", 1, "tpu-v5p-4", 4, 1),
        ("v5p:2x2x2", 1, "tpu-v5p-8", 8, 2),
        ("v5p:8x8x8", 1, "tpu-v5p-512", 512, 128),
        ("v5p:4x4x4", 2, "tpu-v5p-128", 128, 32),
        ("v5e:2x4", 1, "tpu-v5e-8", 8, 1),
        ("v6e:1x1", 1, "tpu-v6e-1", 1, 1),
        ("v6e-16", 1, "tpu-v6e-16", 16, 4),
        ("tpu7x:2x2x1", 1, "tpu7x-8", 4, 1),
        ("h100:8", 1, "gpu-nvidia-h100-80gb-hbm3-8", 8, 1),
        ("H200:1", 1, "gpu-nvidia-h200-1", 1, 1),
        ("h100:32", 1, "gpu-nvidia-h100-80gb-hbm3-32", 32, 4),
        ("cpu:2", 1, "cpu-2", 0, 1),
        ("cpu:2", 2, "cpu-4", 0, 2),
        ("h100:4", 2, "gpu-nvidia-h100-80gb-hbm3-8", 8, 2),  # four of each of two hosts
        ("h100:0.5", 1, "gpu-nvidia-h100-80gb-hbm3-1", 1, 1),
        ("gpu:4", 1, "gpu-4", 4, 1),
        ("v9x[memory=64]:2x2x2", 2, "tpu-v9x-16", 16, 4),
        ("v9x[memory=64;devices=2;shown=tpu9x]:2x2x1", 1, "tpu9x-8", 4, 1),
    ],
)
def test_kind_chips_and_hosts(text: str, slices: int, name: str, chips: int, hosts: int):
    found = parse_devices(text, "fleet.trainer", slices)
    assert (found.name, found.chips, found.hosts) == (name, chips, hosts)
    assert found.each_host * found.hosts == len(found.described)


def test_here_is_this_machine():
    found = parse_devices(HERE, "fleet.trainer")
    assert len(found.described) == len(find_devices()) and found.hosts == 1


@pytest.mark.parametrize(("text", "expected"), [("64 x v5p:2x2x1", 64), ("64xv5p:2x2x1", 64), ("v5p:2x2x1", 1)])
def test_a_number_may_stand_before_the_devices(text: str, expected: int):
    assert parse_count(text, "fleet.workers") == (expected, "v5p:2x2x1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5p:3x3x3", "fleet.workers='v5p:3x3x3': no TPU topology .* nearest: v5p:"),
        ("v5q:2x2x1", "fleet.workers='v5q:2x2x1': there are no devices 'v5q'; did you mean 'v5p'.*GiB of each"),
        ("gpus:2", r"did you mean gpu:2\?"),
        ("8xh100", r"did you mean h100:8\?"),
        ("rtx4090:1", r"no devices 'rtx4090'; known: a100, .*; other GPUs are described: gpu\[memory=24\]:2"),
        ("h100", "fleet.workers='h100': expected how many, as in h100:8"),
        ("h100:12", "expected up to 8, a host's, or a multiple of it"),
        ("h300:8", "did you mean 'h[12]00'"),
        ("h100:1.5", "as in h100:8, or a share of one, from 0.01 to less than 1"),
        ("h100:0.001", "or a share of one, from 0.01"),
        ("cpu:0.5", "expected how many, as in cpu:8$"),
        ("v5e:0.5", "cannot share a TPU chip, because libtpu lets in one process; .*--runtime inprocess"),
    ],
)
def test_devices_that_nobody_sells_are_refused_by_the_field(text: str, message: str):
    with pytest.raises(UserError, match=message):
        parse_devices(text, "fleet.workers")


@pytest.mark.parametrize("text", ["", "0 x v5p:2x2x1", "two slices of v5p"])
def test_texts_that_are_no_devices_are_refused(text: str):
    with pytest.raises(UserError, match="fleet.workers=.*: expected devices such as"):
        parse_count(text, "fleet.workers")


def test_a_share_of_a_gpu_has_its_share_of_the_memory():
    whole, half = parse_devices("h100:1", "fleet.trainer"), parse_devices("h100:0.5", "fleet.trainer")
    assert half.memory == (whole.memory or 0) // 2 and (half.share, whole.share) == (0.5, 1.0)
    with pytest.raises(UserError, match="fleet.trainer='2 x h100:0.5': a share of a GPU is one process"):
        parse_devices("h100:0.5", "fleet.trainer", slices=2)
