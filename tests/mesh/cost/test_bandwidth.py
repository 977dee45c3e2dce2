"""Link speeds of groups, by where they lie in the torus."""

import pytest

from mesh.cost.bandwidth import group_bandwidth
from mesh.cost.collectives import Collective
from mesh.cost.roofline import transfer_seconds
from mesh.topology import parse_topology
from tests.mesh.described import described_mesh

V5P, V6E = 90e9, 90e9  # one link, one direction


@pytest.mark.parametrize(
    ("topology", "axes", "of", "links", "longest"),
    [
        ("v5p:4x4x4", {"fsdp": 64}, ("fsdp",), 6, 4),  # three rings
        ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}, ("tensor",), 2, 4),  # one ring
        ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}, ("fsdp",), 4, 4),
        ("v5p:4x4x4", {"fsdp": 32, "tensor": 2}, ("tensor",), 1, 2),  # half of a ring is open
        ("v5p:2x2x1", {"fsdp": 4}, ("fsdp",), 2, 2),  # nothing closes
        ("v6e:8x8", {"fsdp": 8, "tensor": 8}, ("tensor",), 1, 8),  # closes at 16 only
        ("v6e:16x16", {"fsdp": 16, "tensor": 16}, ("tensor",), 2, 16),
    ],
)
def test_rings_give_two_links_and_open_lines_one(topology, axes, of, links, longest):
    found = parse_topology(topology)
    speed = group_bandwidth(described_mesh(found.shape, **axes), found, of, dcn=False)
    assert speed.rate == pytest.approx(links * V5P)
    assert speed.longest == longest


def test_between_slices_it_is_the_network():
    found = parse_topology("v5p:2x2x1", slices=2)
    mesh = described_mesh((2, 2, 1), slices=2, data=2, fsdp=4)
    assert group_bandwidth(mesh, found, ("data",), dcn=True).rate == 6.25e9
    assert group_bandwidth(mesh, found, ("fsdp",), dcn=False).rate == 2 * V5P


def test_a_permutation_uses_one_link_and_an_all_to_all_passes_several():
    found = parse_topology("v6e:16x16")
    mesh = described_mesh(found.shape, fsdp=16, tensor=16)

    def seconds(kind: str) -> float:
        return transfer_seconds(Collective(kind, ("tensor",), 16, 10**9, 1.0, 0, False, ""), mesh, found)

    assert seconds("all-gather") == pytest.approx(1e9 / (2 * V6E))
    assert seconds("collective-permute") == pytest.approx(1e9 / V6E)
    assert seconds("all-to-all") == pytest.approx(1e9 * 4 / (2 * V6E))
