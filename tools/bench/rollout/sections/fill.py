"""Throughput with the cache a tenth and nine tenths full, with the same work and the same engine.

Two ways to fill it. `held`: requests whose programs wait (as for a tool) hold pages; the share stays as
it is while the others draw. `kept`: prefixes of finished requests, kept for reuse; those that draw add theirs, until
old ones have to go, so searching for what to evict is in the figure.
"""

import itertools
import statistics
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from rl.rollout.agent_loops.commands import AgentLoop, Command, Completion, Generate, Wait, single_turn
from rl.rollout.engine import RolloutEngine
from tools.bench.rollout.sections.bed import Bed, after_warm_up
from tools.bench.rollout.sections.drive import closed_loop

_EMPTY, _FULL = 0.1, 0.9


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the key `fill`: for each way tokens per CPU second at both fills, and their ratio, full by empty."""
    bed = Bed(quick=quick)
    fill: dict[str, Any] = {}
    compiled = 0
    for way in ("held", "kept"):
        fill[way], programs = _way(bed, way)
        compiled += programs
    return {"fill": fill, "warm_compiles": compiled}


def _way(bed: Bed, way: str) -> tuple[dict[str, Any], int]:
    max_num_seqs, prompt, new = (4, 32, 8) if bed.quick else (64, bed.job.prompt_tokens, bed.job.new_tokens)
    filling = 64 if bed.quick else 512  # tokens of the prompts that fill the cache
    drawing = max_num_seqs * -(-(prompt + new) // 16)  # pages of those that draw
    engine = bed.engine(
        max_num_seqs=max_num_seqs,
        max_prompt=filling,
        max_new=new,
        page_size=16,
        pages=1 + round(drawing / _EMPTY),
        enable_prefix_caching=way == "kept",
    )
    params, versions = bed.params(), itertools.count(1)
    agent_loop = _waiting if way == "held" else single_turn

    def run() -> dict[float, tuple[float, float]]:
        engine.set_weights(params, next(versions))  # drops all prefixes
        empty = _throughput(bed, engine, prompt, new)
        target = _FULL * engine.stats()["pages"] - drawing
        engine.set_weights(params, next(versions))
        _fill(bed, engine, target, filling, agent_loop)
        full = _throughput(bed, engine, prompt, new)
        engine.abort_all()
        return {_EMPTY: empty, _FULL: full}

    rounds, compiled = after_warm_up(1 if bed.quick else 5, run)
    figures: dict[str, Any] = {
        name: {
            "tok_per_cpu_s": statistics.median(one[share][0] for one in rounds),
            "pages_used": statistics.median(one[share][1] for one in rounds),
        }
        for name, share in (("tenth", _EMPTY), ("nine_tenths", _FULL))
    }
    return {**figures, "ratio": statistics.median(one[_FULL][0] / one[_EMPTY][0] for one in rounds)}, compiled


def _fill(bed: Bed, engine: RolloutEngine, pages: float, prompt: int, agent_loop: AgentLoop) -> None:
    """Use up `pages` pages, in requests that only hold them or that end and leave them as kept prefixes."""
    while engine.stats()["pages_used"] + prompt // engine.cfg.page_size <= pages:
        engine.submit(bed.request(1, prompt_tokens=prompt, agent_loop=agent_loop))
        while engine.stats()["running"] or engine.stats()["waiting"]:
            engine.step()


def _waiting(completion: Completion) -> Generator[Command, Any, None]:
    """Hold pages and never end."""
    del completion
    yield Generate()
    yield Wait(Future())


def _throughput(bed: Bed, engine: RolloutEngine, prompt: int, new: int) -> tuple[float, float]:
    """Return tokens per CPU second with a full queue, and the mean share of pages used in this time."""
    rows, shares = engine.cfg.max_num_seqs, []

    def note() -> None:
        stats = engine.stats()
        shares.append(stats["pages_used"] / stats["pages"])

    requests = (bed.request(new, prompt_tokens=prompt) for _ in itertools.count())
    loop = closed_loop(engine, requests, concurrent=2 * rows, warm=rows, count=4 * rows, each_turn=note)
    return loop.spent.tokens / loop.spent.cpu_s, statistics.mean(shares)
