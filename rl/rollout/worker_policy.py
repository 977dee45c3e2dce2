"""A policy, as a rollout worker sees it: the roles that it calls for its leases, and features of its rollouts."""

import dataclasses
from typing import Any

from axlearn_like.run.events import EventLog
from axlearn_like.tokenizers.protocol import Tokenizer
from rl.parameter_server.store.page_depot import PageDepot
from rl.protocol.messages import PullStats
from rl.protocol.protocols import LeaseSource, ScoreSource, WeightSource
from rl.rollout.agent_loops.branching import Branching
from rl.rollout.agent_loops.demonstrations import GroupDemonstrations
from rl.rollout.agent_loops.episodes import Episodes
from rl.rollout.agent_loops.graph.rollouts import GraphRollouts
from rl.rollout.agent_loops.interruption import Interruption
from rl.rollout.sampling import Sampler

PULL_ATTEMPTS = 5  # failures in a row before the policy fails


@dataclasses.dataclass(frozen=True)
class WorkerServices[Weights]:
    """The roles that a worker calls."""

    controller: LeaseSource
    weights: WeightSource[Weights]
    verifier: ScoreSource
    events: EventLog
    pull_timeout: float = 60.0  # seconds that a pull of weights may take
    depot: PageDepot | None = None  # takes the KV pages of rollouts that are handed back; None: they are computed again


@dataclasses.dataclass(frozen=True)
class WorkerFeatures:
    """Features of a worker's rollouts, none by default."""

    # Details of a rollout that the scorer wants beside its answer (`Scorer.Config.wants`)
    wants: frozenset[str] = frozenset()
    episodes: Episodes | None = None
    branching: Branching | None = None  # samples of a prompt share their first tokens, except in evaluations
    # Demonstrations among the samples, except in evaluations; None: the policy draws all
    demonstrations: GroupDemonstrations | None = None
    interruption: Interruption | None = None  # long thinking is interrupted, in evaluations too
    graph: GraphRollouts | None = None  # samples are plans whose nodes are drawn in parallel, in evaluations too


@dataclasses.dataclass(frozen=True)
class WorkerPolicy[Weights]:
    """The parts of a worker that belong to one policy."""

    tokenizer: Tokenizer
    seed: int
    services: WorkerServices[Weights]
    features: WorkerFeatures = WorkerFeatures()
    sampler: Sampler.Config | None = None  # None: the engine's


def pull_figures(moved: PullStats) -> dict[str, Any]:
    """Return the event fields of a pull. Its `seconds` are time blocked; most of the transfer overlaps drawing."""
    seconds = round(moved.seconds, 4)
    figures = {"nbytes": moved.needed, "network": moved.network, "source": moved.source, "checksum": moved.checksum}
    return {**figures, "transfer_seconds": seconds}
