"""RL over coded pages: an engine whose sequences pause every few tokens, so that their pages leave and come back."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, override

from rl.rollout.agent_loops.commands import Command, Completion, Generate, Wait
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.tiers.costs import Tier
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.request import OnTokens, Request

PIECE = 4  # tokens from one pause to the next
PAUSE_S = 0.02
_PAUSES = ThreadPoolExecutor(64, thread_name_prefix="pauses")


class PausingEngine(RolloutEngine):
    """An engine that brings every page back, whatever it costs: computing pages of a small policy again is cheaper."""

    @override
    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> int:
        tiers = self.scheduler.kv_cache.tiers
        assert tiers is not None
        tiers.costs.pays = _always
        return super().submit(dataclasses.replace(request, agent_loop=_in_pieces), on_tokens)


def _always(tokens: int, nbytes: dict[Tier, int]) -> bool:
    del tokens, nbytes
    return True


def pausing_engine(codec: str) -> RolloutEngine.Config:
    """Return the engine of a run: a pool for about a third of the pages of 64 rollouts."""
    tiers = HostTiers.Config(codec=codec)
    return PausingEngine.Config(max_num_seqs=16, page_size=8, pages=64, keep_completions=False, tiers=tiers)


def _in_pieces(completion: Completion) -> Generator[Command, Any, None]:
    drawn = -1
    while len(completion.output_tokens) > drawn:
        drawn = len(completion.output_tokens)
        if (yield Generate(max_new_tokens=PIECE)) != "length":
            return
        yield Wait(_PAUSES.submit(time.sleep, PAUSE_S))
