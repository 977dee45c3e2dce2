"""Fair shares over intervals, against the bounds of deficit round robin, on schedules that hypothesis draws."""

import math
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh import UserError
from rl.controller.fair_share import FairShare, Quota

WEIGHTS = {"a": 1.0, "b": 2.5, "c": 0.4}
QUANTUM, LARGEST = 32.0, 200
COSTS = st.lists(st.integers(0, LARGEST), min_size=1, max_size=120)
AHEAD = 1e-6  # error of sums of floats


def weight(name: str) -> float:
    return WEIGHTS.get(name, 1.0)


def widest(served: Iterable[tuple[str, float]], a: str, b: str) -> float:
    """Return the largest |served_a / weight_a - served_b / weight_b| over all intervals of a schedule."""
    lead, low, high, found = 0.0, 0.0, 0.0, 0.0
    for name, tokens in served:
        lead += tokens / weight(a) if name == a else -tokens / weight(b) if name == b else 0.0
        found = max(found, lead - low, high - lead)
        low, high = min(low, lead), max(high, lead)
    return found


def bound(a: str, b: str, in_hand: int = 1) -> float:
    """Return the bound of `widest`; with several in hand, also what their costs were mistaken for."""
    largest = LARGEST if in_hand == 1 else 2 * in_hand * LARGEST
    return 2 * QUANTUM + largest / weight(a) + largest / weight(b) + AHEAD


@given(COSTS)
def test_shares_of_all_that_always_have_work_follow_the_weights(costs: list[int]):
    share, served = FairShare(WEIGHTS, quantum=QUANTUM), []
    for tokens in costs:
        name = share.choose(("a", "b", "c", "unweighted"))
        share.charge(name, tokens)
        served.append((name, tokens))
    for a, b in (("a", "b"), ("a", "c"), ("b", "c"), ("a", "unweighted")):
        assert widest(served, a, b) <= bound(a, b)


@given(COSTS, st.lists(st.sets(st.sampled_from("cdefg")), min_size=120, max_size=120))
def test_those_that_come_and_go_do_not_change_the_shares_of_others(costs: list[int], others: list[set[str]]):
    share, served = FairShare(WEIGHTS, quantum=QUANTUM), []
    for tokens, also in zip(costs, others, strict=False):
        name = share.choose({"a", "b"} | also)
        assert name in {"a", "b"} | also
        share.charge(name, tokens)
        served.append((name, tokens))
    assert widest(served, "a", "b") <= bound("a", "b")


@given(COSTS, st.integers(2, 6), st.randoms())
def test_several_pieces_in_hand_at_once(costs: list[int], in_hand: int, random):
    share, served, hand = FairShare(WEIGHTS, quantum=QUANTUM), [], []
    for tokens in costs:
        while len(hand) < in_hand:
            hand.append(share.choose(("a", "b")))
        done = hand.pop(random.randrange(len(hand)))  # work ends in any order
        share.charge(done, tokens)
        served.append((done, tokens))
    assert widest(served, "a", "b") <= bound("a", "b", in_hand)


def test_workers_that_ask_at_once_are_not_all_given_to_one():
    share = FairShare()
    for _ in range(10):
        share.charge(share.choose(("a", "b")), 1000)
    asked = Counter(share.choose(("a", "b")) for _ in range(8))  # none of it done before all are asked
    assert asked == {"a": 4, "b": 4}


@given(COSTS, st.lists(st.integers(0, 5), min_size=120, max_size=120))
def test_nobody_waits_for_more_than_the_shares_of_the_others(costs: list[int], busy: list[int]):
    share, others, waited = FairShare(WEIGHTS, quantum=QUANTUM), "bcdef", Counter[str]()
    for tokens, count in zip(costs, busy, strict=False):
        name = share.choose({"a", *others[:count]})
        share.charge(name, tokens)
        if name == "a":
            waited.clear()
            continue
        waited[name] += tokens
        most = (LARGEST / weight("a") + 2 * QUANTUM) * weight(name) + LARGEST
        assert waited[name] <= most + AHEAD


@given(COSTS, st.integers(1, 60))
def test_who_was_idle_has_no_credit_but_its_debts_are_paid(costs: list[int], alone: int):
    share = FairShare(WEIGHTS, quantum=QUANTUM)
    share.charge(share.choose("a"), LARGEST)
    for _ in range(alone):  # "b" is served while "a" is idle
        share.charge(share.choose("b"), LARGEST)
    served = []
    for tokens in costs:
        name = share.choose(("a", "b"))
        share.charge(name, tokens)
        served.append((name, tokens))
    assert widest(served, "a", "b") <= bound("a", "b")  # bound of two that were never idle
    ahead = sum(tokens / weight(name) * (1 if name == "a" else -1) for name, tokens in served)
    assert ahead <= QUANTUM + (LARGEST + QUANTUM * weight("b")) / weight("b") + LARGEST / weight("a") + AHEAD


@given(st.lists(st.integers(1, LARGEST), min_size=40, max_size=40), st.integers(1, 8))
def test_a_burst_costs_others_no_more_than_its_share(sizes: list[int], bursts: int):
    """One asks now and then for less than its share, others always for all: it waits a bounded time, counted in tokens.

    It uses at most a third of the tokens that pass, of which its weight gives it half.
    """
    greedy = [f"greedy-{n}" for n in range(bursts)]
    share = FairShare({"modest": float(bursts)}, quantum=QUANTUM)
    now = 0.0
    for size in sizes:
        asked = now
        while (name := share.choose(["modest", *greedy])) != "modest":
            share.charge(name, LARGEST)
            now += LARGEST
        share.charge(name, size)
        assert now - asked <= LARGEST + bursts * (2 * QUANTUM + LARGEST)  # debts, and a turn of each other
        now += size
        while now < asked + 3 * size:
            share.charge(share.choose(greedy), LARGEST)
            now += LARGEST


def test_a_forgotten_name_comes_back_without_debts():
    share = FairShare()
    share.charge(share.choose("a"), 1e6)
    share.choose("a")
    share.forget("a")
    share.charge(share.choose("b"), 1000)
    assert share.choose(("a", "b")) == "a"


def test_what_came_to_nothing_costs_nothing():
    share = FairShare(quantum=10)
    for _ in range(50):
        share.charge(share.choose("a"), 0)
    share.charge(share.choose(("a", "b")), 100)
    assert share.choose(("a", "b")) == "b"


def test_bad_shares_are_refused():
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UserError, match="share of 'a' is .*; expected a finite number above 0"):
            FairShare({"a": bad})
    with pytest.raises(UserError, match="quantum=0"):
        FairShare(quantum=0)
    with pytest.raises(ValueError, match="nobody to choose from"):
        FairShare().choose(())


class Clock:
    """Seconds that the test advances."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


STEPS = st.lists(st.tuples(st.integers(1, LARGEST), st.floats(0, 8)), min_size=2, max_size=80)


@given(STEPS, st.floats(1, 200))
def test_a_name_begins_no_more_than_its_tokens_a_second(steps: list[tuple[int, float]], rate: float):
    clock, began = Clock(), list[tuple[float, int]]()
    share = FairShare(quantum=1, quotas={"slow": Quota(tokens_per_second=rate)}, clock=clock)
    for tokens, seconds in steps:
        clock.now += seconds
        assert "fast" in share.within(("slow", "fast"))
        if share.within(("slow",)):
            began.append((clock.now, tokens))
            share.charge(share.choose(("slow",)), tokens)
    for i in range(len(began)):
        for j in range(i, len(began)):
            seconds = began[j][0] - began[i][0]
            assert sum(tokens for _, tokens in began[i : j + 1]) <= rate * seconds + LARGEST + AHEAD * len(began)


@given(st.integers(1, LARGEST), st.integers(1, 5 * LARGEST), st.lists(st.booleans(), max_size=60))
def test_a_name_has_no_more_in_flight_than_its_limit(cost: int, most: int, begins: list[bool]):
    share, hand = FairShare(quantum=cost, quotas={"a": Quota(tokens_in_flight=most)}), 0
    for begin in begins:
        if begin and share.within(("a",)):
            share.choose(("a",))
            hand += 1
        elif hand and not begin:
            share.charge("a", cost)
            hand -= 1
        assert hand * cost <= max(most, cost)
        assert bool(share.within(("a",))) == (not hand or (hand + 1) * cost <= most)


def test_a_rate_is_reached_and_a_single_large_piece_is_served():
    clock = Clock()
    share = FairShare(quantum=1, quotas={"a": Quota(10.0, 5.0)}, clock=clock)
    served = 0
    for second in range(100):
        clock.now = float(second)
        if share.within(("a",)):
            share.charge(share.choose(("a",)), 50)
            served += 50
    assert served == 1000


@pytest.mark.parametrize(
    ("quota", "message"),
    [
        (Quota(tokens_per_second=0.0), r"quota of 'a'.tokens_per_second: expected a finite number above 0, .* got 0.0"),
        (Quota(tokens_in_flight=math.inf), r"quota of 'a'.tokens_in_flight: expected a finite number above 0, .* inf"),
        (Quota(tokens_in_flight=True), r"quota of 'a'.tokens_in_flight: expected a finite number above 0, .* got True"),
    ],
)
def test_limits_that_are_none_are_refused_by_name(quota: Quota, message: str):
    with pytest.raises(UserError, match=message):
        FairShare(quotas={"a": quota})
