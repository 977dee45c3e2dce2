"""The number of machines that a fleet takes."""

import pytest

from rl.fleet.devices import count_hosts, parse_devices


@pytest.mark.parametrize(
    ("roles", "hosts"),
    [
        ([(1, "h100:8", 1), (8, "h100:1", 1)], 2),
        ([(1, "h100:4", 1), (4, "h100:1", 1)], 1),
        ([(1, "h100:4", 1), (5, "h100:1", 1)], 2),
        ([(3, "h100:3", 1)], 2),  # of eight GPUs, two are left over
        ([(1, "h100:0.5", 1), (2, "h100:0.25", 1)], 1),
        ([(8, "h100:0.75", 1), (1, "h100:2", 1)], 1),
        ([(1, "h100:4", 1), (1, "h200:4", 1)], 2),  # of one kind are the GPUs of a host
        ([(1, "h100:16", 1), (2, "h100:4", 1)], 3),
        ([(2, "h100:4", 2)], 2),  # each over two hosts, which they share
        ([(1, "v5e:2x2", 1), (4, "v5e:1x1", 1)], 1),
        ([(1, "v5p:2x2x2", 1), (2, "v5p:2x2x1", 1), (3, "v5p:1x1x1", 1)], 2 + 2 + 1),
        ([(1, "v5p:8x8x8", 1), (64, "v5p:2x2x2", 1)], 128 + 128),
        ([(1, "v6e:2x4", 2), (2, "v6e:1x1", 1)], 3),  # two slices of a host each
        ([(1, "cpu:2", 2), (3, "cpu:1", 1)], 5),
    ],
)
def test_roles_share_hosts_where_they_fit(roles: list[tuple[int, str, int]], hosts: int) -> None:
    found = [(count, parse_devices(text, "fleet.workers", slices)) for count, text, slices in roles]
    assert count_hosts(found) == hosts == count_hosts(found[::-1])
