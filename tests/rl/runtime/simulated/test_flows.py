"""Max-min fair rates against linear programs, and flows against a step-by-step replay."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh import UserError
from rl.runtime.simulated.flows import Flows, max_min_rates
from rl.runtime.simulated.virtual_clock import VirtualClock
from tests.bounds import within


def by_linear_programs(paths: Sequence[Sequence[str]], capacities: Mapping[str, float]) -> list[float]:
    """Return the lexicographically largest sorted rates: a program for each level, and one for each flow at it."""
    optimize = pytest.importorskip("scipy.optimize")
    links = sorted(capacities)
    crosses = np.array([[path.count(link) for path in map(list, paths)] for link in links], float)
    count, fixed = len(paths), dict[int, float]()

    def best(target: np.ndarray, floor: float) -> Any:
        """Maximise target @ (rates, level) where flows not fixed have at least the level, which is at least floor."""
        free = [n for n in range(count) if n not in fixed]
        above = np.zeros((len(free), count + 1))
        for row, n in enumerate(free):
            above[row, n], above[row, -1] = -1.0, 1.0
        bounds = [(fixed[n], fixed[n]) if n in fixed else (0.0, None) for n in range(count)] + [(floor, None)]
        matrix = np.vstack([np.hstack([crosses, np.zeros((len(links), 1))]), above])
        limits = np.concatenate([[capacities[link] for link in links], np.zeros(len(free))])
        return optimize.linprog(-target, matrix, limits, bounds=bounds, method="highs")

    while len(fixed) < count:
        level = -best(np.eye(count + 1)[-1], 0.0).fun
        floor = level * (1 - 1e-9) - 1e-12
        for n in [n for n in range(count) if n not in fixed]:
            if -best(np.eye(count + 1)[n], floor).fun <= level * (1 + 1e-6) + 1e-9:
                fixed[n] = level
    return [fixed[n] for n in range(count)]


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("seed", range(40))
def test_rates_are_those_of_linear_programs(seed: int):
    rng = random.Random(seed)
    links = {f"l{n}": rng.choice((1.0, 2.5, 10 * rng.random() + 0.1)) for n in range(rng.randint(1, 6))}
    paths = [rng.sample(sorted(links), rng.randint(1, len(links))) for _ in range(rng.randint(1, 9))]
    rates = max_min_rates(paths, links)
    np.testing.assert_allclose(rates, by_linear_programs(paths, links), rtol=1e-5, atol=1e-6)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_flow_is_bounded_by_its_limit_or_by_a_full_link_where_none_has_more(data: st.DataObject):
    sizes = st.floats(0.01, 1e9)
    links = data.draw(st.dictionaries(st.sampled_from("abcdef"), sizes, min_size=1))
    each = st.tuples(st.lists(st.sampled_from(sorted(links)), unique=True), st.one_of(sizes, st.just(math.inf)))
    flows = [flow for flow in data.draw(st.lists(each, max_size=12)) if flow[0] or flow[1] < math.inf]
    rates = max_min_rates([path for path, _ in flows], links, [limit for _, limit in flows])
    used = {link: sum(rate for rate, (path, _) in zip(rates, flows, strict=True) if link in path) for link in links}
    assert all(used[link] <= links[link] * (1 + 1e-9) for link in links)
    for rate, (path, limit) in zip(rates, flows, strict=True):
        most = {link: max(r for r, (p, _) in zip(rates, flows, strict=True) if link in p) for link in path}
        full = [link for link in path if used[link] >= links[link] * (1 - 1e-9) and most[link] <= rate * (1 + 1e-9)]
        assert rate == limit or full


def test_what_is_no_path_is_refused():
    with pytest.raises(UserError, match=r"no link 'nic-1'.*nic1"):
        max_min_rates([["nic-1"]], {"nic1": 1.0})
    with pytest.raises(UserError, match="a flow without a path"):
        max_min_rates([[]], {"nic1": 1.0})
    with pytest.raises(UserError, match="expected bytes a second, 0 or more"):
        max_min_rates([["nic1"]], {"nic1": -1.0})


@pytest.mark.numerics
@pytest.mark.parametrize("seed", range(8))
def test_flows_end_as_in_a_replay_that_computes_all_rates_at_every_change(seed: int):
    rng = random.Random(seed)
    links = {f"l{n}": 1.0 + 9 * rng.random() for n in range(5)}
    flows = [
        (
            20 * rng.random(),
            rng.sample(sorted(links), rng.randint(1, 3)),
            30 * rng.random(),
            rng.choice((math.inf, 1.5)),
        )
        for _ in range(25)
    ]
    clock = VirtualClock()
    network, ends = Flows(clock, links), dict[int, float]()

    def process(n: int) -> None:
        begins, path, size, limit = flows[n]
        clock.sleep(begins)
        network.pass_through(path, size, limit)
        ends[n] = clock()

    for n in range(len(flows)):
        clock.spawn(f"flow-{n}", lambda n=n: process(n))
    clock.run()
    expected = replayed(flows, links)
    for n, end in expected.items():
        assert within(ends[n] - end, 1e-6)
    assert within(network.busy["l0"] - sum(size for _, path, size, _ in flows if "l0" in path), 1e-6)


def replayed(flows: Sequence[tuple[float, list[str], float, float]], links: Mapping[str, float]) -> dict[int, float]:
    """Return when each flow ends: from change to change, all rates again."""
    now, left, ends = 0.0, {n: size for n, (_, _, size, _) in enumerate(flows)}, dict[int, float]()
    while len(ends) < len(flows):
        active = [n for n in left if n not in ends and flows[n][0] <= now]
        rates = max_min_rates([flows[n][1] for n in active], links, [flows[n][3] for n in active])
        nexts = [flows[n][0] for n in left if flows[n][0] > now]
        nexts += [now + left[n] / rate for n, rate in zip(active, rates, strict=True)]
        then = min(nexts)
        for n, rate in zip(active, rates, strict=True):
            left[n] -= rate * (then - now)
            if left[n] <= 1e-9:
                ends[n] = then
        now = then
    return ends


def test_a_killed_readers_share_goes_to_the_others():
    clock, ends = VirtualClock(), dict[str, float]()
    network = Flows(clock, {"nic": 10.0})

    def reader(name: str) -> None:
        network.pass_through(["nic"], 100.0)
        ends[name] = clock()

    def killer() -> None:
        clock.sleep(4.0)
        clock.kill("b")
        network.drop("b")

    clock.spawn("a", lambda: reader("a"))
    clock.spawn("b", lambda: reader("b"))
    clock.spawn("killer", killer)
    clock.run()
    assert ends == {"a": 12.0}  # 4 s at 5, then 80 at 10
