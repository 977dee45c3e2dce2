"""Chips that train and chips that draw: all pairs of kinds, no chip twice, the first worker on which a policy fits."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh import UserError
from mesh.topology import parse_topology
from rl.runtime.simulated.sources.chips import assignments, fleets_that_fit, read_chips

CHIPS = st.dictionaries(st.sampled_from(["v4", "v5e", "v5p", "v6e", "tpu7x"]), st.integers(1, 300), min_size=1)


def sizes(text: str) -> tuple[tuple[str, int], tuple[str, int, int]]:
    """Return kind and chips of the trainer, and kind, chips and number of the workers."""
    found = re.fullmatch(r"trainer=(\w+):(\S+),workers=(\d+)x(\w+):(\S+)", text)
    assert found is not None
    trainer, worker = (parse_topology(f"{found[n]}:{found[n + 1]}") for n in (1, 4))
    each = [one.devices // one.generation.devices for one in (trainer, worker)]
    return (found[1], each[0]), (found[4], each[1], int(found[3]))


@given(CHIPS)
def test_all_pairs_of_kinds_and_no_chip_twice(chips: dict[str, int]):
    pairs = set[tuple[str, str]]()
    for fleets in assignments(chips):
        before = 0
        for text in fleets:
            (trains, trainer), (draws, each, number) = sizes(text)
            pairs.add((trains, draws))
            used = {trains: trainer}
            used[draws] = used.get(draws, 0) + each * number
            assert number >= 1 and before < each
            assert all(used[kind] <= chips[kind] for kind in used)
            assert chips[draws] - used[draws] < each or trains == draws  # no worker more has room
            before = each
    assert {(a, b) for a in chips for b in chips if a != b} <= pairs
    assert {(a, a) for a, count in chips.items() if count >= 2} <= pairs


def test_the_smallest_worker_on_which_the_policy_fits_is_taken():
    def load(text: str) -> str:
        if text.startswith("trainer=v6e:2x2,workers=4xv6e"):
            raise UserError("no mesh")
        if text.endswith("1x1"):
            raise UserError("the worker is too small")
        return text

    found, refused = fleets_that_fit({"v5e": 8, "v6e": 4}, load)
    assert set(found) == {
        "trainer=v5e:2x2,workers=1xv5e:2x2",
        "trainer=v5e:2x4,workers=1xv6e:2x2",
        "trainer=v6e:2x2,workers=2xv5e:2x2",
    }
    assert refused == {"trainer=v6e:1x1,workers=3xv6e:1x1": "the worker is too small"}
    with pytest.raises(UserError, match=r"fits on no fleet of these chips\n  trainer=v5e:1x1,workers=1xv5e:1x1: the"):
        fleets_that_fit({"v5e": 2}, load)


@pytest.mark.parametrize("text", ["", "v5e", "v5e=", "v5e=0", "v5e=-1", "v5e=1,v5e=2", "v5e=1.5", "=4", "workers=3"])
def test_other_texts_are_refused(text: str):
    with pytest.raises(UserError, match="expected workers=FIRST|no TPU generation"):
        read_chips(text)


def test_numbers_of_chips_by_kind():
    assert read_chips("v5e=16, v6e=8") == {"v5e": 16, "v6e": 8}
