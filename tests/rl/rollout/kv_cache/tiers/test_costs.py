import pytest

from rl.rollout.kv_cache.tiers.costs import TransferCosts


def test_everything_pays_before_it_was_measured():
    costs = TransferCosts()
    assert costs.pays(16, {"host": 10**12, "disk": 10**12})
    costs.prefilled(100, 1.0)
    assert costs.pays(16, {"disk": 10**12})


def test_the_cheaper_way_is_taken_tier_by_tier():
    costs = TransferCosts()
    costs.prefilled(100, 1.0)  # 10 ms a token
    costs.brought("host", 10, 1000, 0.01)  # 10 us a byte
    costs.brought("disk", 10, 1000, 1.0)  # 1 ms a byte
    assert costs.pays(10, {"host": 9_000})
    assert not costs.pays(10, {"host": 11_000})
    assert costs.pays(10, {"host": 0, "disk": 90})
    assert not costs.pays(10, {"host": 5_000, "disk": 60})


def test_what_was_refused_is_measured_again():
    costs = TransferCosts()
    costs.prefilled(100, 1.0)
    costs.brought("host", 10, 1000, 10.0)
    answers = [costs.pays(10, {"host": 1000}) for _ in range(64)]
    assert answers.count(True) == 2
    for _ in range(60):
        costs.brought("host", 10, 1000, 0.001)
    assert costs.pays(10, {"host": 1000})


def test_seconds_saved_are_those_of_computing_less_those_of_bringing():
    costs = TransferCosts()
    costs.brought("host", 10, 1000, 0.5)
    assert costs.seconds_saved == -0.5
    costs.prefilled(10, 1.0)
    costs.brought("host", 10, 1000, 0.25)
    assert costs.seconds_saved == pytest.approx(-0.5 + 1.0 - 0.25)


def test_few_dispatches_are_timed():
    costs = TransferCosts()
    assert [costs.time_next() for _ in range(3)] == [False, True, True]  # the first may compile
    costs.prefilled(1, 1.0)
    assert sum(costs.time_next() for _ in range(160)) == 10
