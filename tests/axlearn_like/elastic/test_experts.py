"""Experts over members: who holds and computes what, what moves after a loss, and bad input."""

import json

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.elastic.channel import Address
from axlearn_like.elastic.experts import ExpertMap, SpreadExperts, place_experts, transfers

LAYERS, EXPERTS, PARTS = 3, 8, 32
LOADS = np.stack([np.random.default_rng(layer).permutation(np.arange(1, 9) ** -1.2) for layer in range(LAYERS)])
EVERYONE = {key: list(range(8)) for key in np.ndindex(LAYERS, EXPERTS)}


def addresses(*ports: int) -> list[Address]:
    return [("127.0.0.1", port) for port in ports]


def first(members: int = 8, slots: int = 4, copies: int = 2) -> ExpertMap:
    have = {key: list(range(members)) for key in EVERYONE}
    return place_experts(LOADS, addresses(*range(members)), slots, copies, have, 0)


def test_every_expert_is_held_as_often_as_asked_and_every_part_is_computed_by_a_holder():
    placed = first()
    holders, calls = placed.holders(), placed.calls(PARTS)
    assert min(map(len, holders.values())) >= 2 and sorted(holders) == sorted(EVERYONE)
    for (layer, expert), places in holders.items():
        assert set(calls[layer, expert]) <= set(places)
        assert np.count_nonzero(np.diff(calls[layer, expert])) < len(places), "a member's parts are consecutive"
    rows = np.array([[np.sum(LOADS[layer] @ (calls[layer] == m)) for m in range(8)] for layer in range(LAYERS)])
    assert (rows.max(axis=1) / rows.mean(axis=1)).max() < 1.25
    assert ExpertMap.from_json(json.loads(json.dumps(placed.to_json()))).to_json() == placed.to_json()


def test_after_a_loss_only_what_is_missing_moves_and_from_those_who_have_it():
    before = first()
    left = addresses(0, 1, 2, 4, 5, 6, 7)
    at = {address: place for place, address in enumerate(left)}
    have = {
        key: [at[before.addresses[place]] for place in places if place != 3] for key, places in before.holders().items()
    }
    assert all(have.values()), "with two copies no expert is lost with one member"
    after = place_experts(LOADS, left, 4, 2, have, 0)
    wanted, moves = after.holders(), transfers(have, after.holders())
    moved = [(key, receiver) for (_, receiver), keys in moves.items() for key in keys]
    assert sorted(moved) == sorted(
        (key, place) for key, places in wanted.items() for place in set(places) - set(have[key])
    )
    assert all(sender in have[key] for (sender, _), keys in moves.items() for key in keys)
    fresh = place_experts(LOADS, left, 4, 2, {key: list(range(7)) for key in have}, 0).holders()
    unmatched = sum(len(set(places) - set(have[key])) for key, places in fresh.items())
    assert len(moved) <= unmatched and len(moved) < 0.5 * sum(map(len, wanted.values()))
    assert transfers(wanted, wanted) == {}


def test_those_who_have_the_same_experts_share_the_sending():
    have = {(0, expert): [0, 1, 2] for expert in range(6)}
    moves = transfers(have, {key: [0, 1, 2, 3] for key in have})
    assert moves == {(sender, 3): [(0, sender), (0, sender + 3)] for sender in range(3)}


def test_the_threshold_is_lowered_to_what_there_is_room_for():
    cfg = SpreadExperts.Config(slots=3, copies=3)
    assert [cfg.held_copies(8, members) for members in (9, 8, 7, 5, 3, 2)] == [3, 3, 2, 1, 1, 0]
    assert SpreadExperts.Config(slots=16, copies=3).held_copies(8, 2) == 2, "one to a member"


def test_fewer_copies_than_are_wanted_are_said():
    said = SpreadExperts.Config(slots=5).check_members(8, 3)
    assert said is not None and "hold 1 of 2 copies" in said and said.endswith("; slots=6 holds 2")
    assert SpreadExperts.Config(slots=6).check_members(8, 3) is None
    few = SpreadExperts.Config(slots=16, copies=3).check_members(8, 2)
    assert few is not None and few.endswith("loses 2 at once goes back to its checkpoint")


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="slots: expected 3 or more: 3 members hold the 8 experts of a layer, got 2"):
        SpreadExperts.Config(slots=2).check_members(8, 3)
    with pytest.raises(ConfigError, match="copies: expected"):
        SpreadExperts.Config(slots=2, copies=0).check_fields()
