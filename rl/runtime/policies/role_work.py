"""Leases of episodes that several policies play: drawn together where they were granted together, delivered each alone.

Every episode has a request for each role, drawn by the adapter that sits there. A lease keeps the rollouts of its own
policy. One that comes alone, since the others of its kind were delivered before a worker died, is played by all roles
again, to the same bits; what it does not want is dropped.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, override

from axlearn_like.input.shuffle import derived_seed
from rl.protocol.messages import Episode, Lease
from rl.protocol.players import OWN
from rl.rollout.leased_work import LeasedWork, RequestEngine
from rl.rollout.request import Request, RequestOutput, draw_seed
from rl.rollout.worker_policy import WorkerPolicy
from rl.runtime.policies.adapters import adapter_name


def works_of(lease: Lease, policies: Mapping[str, WorkerPolicy[Any]], worker: str) -> list[LeasedWork]:
    """Return the works of a lease and those beside it; of the same episodes, they draw together."""
    works: list[LeasedWork] = []
    plays: list[_Play] = []
    for one in (lease, *lease.beside):
        if all(seat.role == OWN or not seat.learns for seat in one.seats):  # no roles
            works.append(LeasedWork(one, policies[one.policy], worker))
            continue
        play = next((play for play in plays if play.fits(one)), None)
        if play is None:
            plays.append(play := _Play(one, policies))
        works.append(RoleWork(one, policies[one.policy], worker, play))
    return works


class RoleWork(LeasedWork):
    """The work of one lease, of episodes that others may share."""

    def __init__(self, lease: Lease, policy: WorkerPolicy[Any], worker: str, play: "_Play"):
        """Join the play; a lease that was handed back is played from its start."""
        super().__init__(dataclasses.replace(lease, partial=()), policy, worker)
        self._play = play
        self._own: set[int] = set()  # numbers of the requests of its own role
        self.role = next(seat.role for seat in lease.seats if seat.policy == lease.policy and seat.learns)
        play.works.append(self)

    @override
    def shares_episodes(self, other: LeasedWork) -> bool:
        return any(LeasedWork.shares_episodes(one, other) for one in self._play.works)

    @override
    def begin(
        self, engine: RequestEngine, adapter: str | None = None, policies: Mapping[str, str | None] | None = None
    ) -> None:
        self._play.begin(engine)

    def started(self, numbers: Mapping[int, str], records: Mapping[int, Mapping[str, dict[int, Episode]]]) -> None:
        """Take up the play. `numbers`: requests and their roles; `records`: by problem, role and sample."""
        episodes = self.policy.features.episodes
        assert episodes is not None, "environments have roles"
        for problem, by_role in records.items():
            episodes.record(problem, by_role[self.role])
        self._own = {number for number, role in numbers.items() if role == self.role}
        self.begun = True
        self._given = {number: [] for number in numbers}  # all: adapters are held until the last role ends

    @override
    def take(self, outputs: Iterable[RequestOutput]) -> None:
        mine = [one for one in outputs if one.number in self._given]
        self._found |= {one.number: one.rollouts if one.number in self._own else () for one in mine}

    @override
    def abort(self, engine: RequestEngine) -> None:
        if self in self._play.works:
            self._play.works.remove(self)
        if not self._play.works:
            super().abort(engine)

    @override
    def hand_back(self) -> None:
        self.policy.services.controller.hand_back(self.lease.id, ())


class _Play:
    """The episodes of leases that were granted together."""

    def __init__(self, lease: Lease, policies: Mapping[str, WorkerPolicy[Any]]):
        self._lease, self._policies = lease, policies
        self.works: list[RoleWork] = []

    def fits(self, lease: Lease) -> bool:
        """Return True if a lease is of the same episodes."""
        mine, other = ((one.seats, one.samples, [(p.id, p.draw) for p in one.prompts]) for one in (self._lease, lease))
        return mine == other

    def begin(self, engine: RequestEngine) -> None:
        """Submit the requests of all roles."""
        lease, numbers, records = self._lease, dict[int, str](), dict[int, dict[str, dict[int, Episode]]]()
        episodes = self._policies[lease.policy].features.episodes
        assert episodes is not None, "environments have roles"
        for prompt in lease.prompts:
            play = episodes.play(prompt)
            records[prompt.id] = play.episodes
            for seat in lease.seats:
                policy = self._policies[seat.policy or lease.policy]
                request = Request(
                    prompt,
                    lease.samples,
                    derived_seed("role", draw_seed(policy.seed, prompt.draw), seat.role) % 2**32,
                    sampler=policy.sampler if seat.policy else None,
                    adapter=adapter_name(seat) if seat.policy else None,
                    agent_loop=play.loop(seat.role),
                )
                numbers[engine.submit(request)] = seat.role
        for work in self.works:
            work.started(numbers, records)
