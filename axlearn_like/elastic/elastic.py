"""The config of elastic training, and a member's place in its run."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, override

from jax.sharding import Mesh

from axlearn_like.checkpoint.tiers import CheckpointTiers
from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.elastic.experts import LEAST_ROWS, SpreadExperts
from axlearn_like.elastic.member import Member
from axlearn_like.elastic.membership import MemberTimeouts
from axlearn_like.elastic.memory import PeerMemory
from axlearn_like.elastic.supervisor import VARIABLE, MemberSupervisor
from axlearn_like.elastic.update import ElasticStep, Summed
from axlearn_like.run.events import EventLog
from mesh.distributed import ProcessGroup


class Elastic(Configurable):
    """Training by processes that come and go; each holds the whole state, on a mesh of its own devices."""

    class Config(ConfigBase["Elastic"]):
        parts: int = 16  # parts of a batch, summed in a fixed tree; no more members than that have work
        silence: float = 10.0  # seconds without a sign of life after which a member counts as lost
        patience: float = 60.0  # seconds for all members to come at the start, and for a member that others wait for
        experts: SpreadExperts.Config | None = None  # experts of which each member holds a part; None: each holds all

        @override
        def check_fields(self) -> None:
            self.require_least(1, "parts")
            for field in ("silence", "patience"):
                self.require(field, getattr(self, field) > 0, "seconds, more than 0")

        def check_trainer(self, trainer: Any, drops_out: str | None) -> None:
            """Refuse what members cannot do together (ConfigError); `drops_out`: a layer of the model that does."""
            no = {"early_stopping": None, "keep_best": None, "sdc_check": None, "replicas": None, "writers": ()}
            for field, none in no.items():
                trainer.require(field, getattr(trainer, field) == none, f"{none} with elastic")
            trainer.require("microbatches", trainer.microbatches == 1, "1 with elastic, whose parts take their place")
            rows = trainer.input.batch_size
            self.require("parts", rows % self.parts == 0, f"a divisor of input.batch_size, {rows}")
            trainer.require("loss", not trainer.loss.scores, "one that scores by no other policy, with elastic")
            trainer.require("model", drops_out is None, f"one without dropout, with elastic ({drops_out} has some)")

        def check_members(self, trainer: Any, members: int) -> str | None:
            """Return a warning where so few members hold fewer copies of experts than are wanted; None: they hold all.

            Raises:
                ConfigError: there are more members than have work, or fewer than have room for all experts.
            """
            self.require("parts", members <= self.parts, f"{members} or more: each of {members} members computes some")
            if self.experts is None:
                return None
            return self.experts.check_members(trainer.model.block.feed_forward.num_experts, members)

        def check_mesh(self, mesh: Mesh) -> None:
            """Refuse a mesh that shards parameters where experts are spread (ConfigError)."""
            fits = self.experts is None or (mesh.shape["data"] == mesh.size and LEAST_ROWS % mesh.size == 0)
            expected = f"None on a mesh of {mesh.size} devices; with experts the axis data alone, of 1, 2, 4 or 8"
            self.require("experts", fits, expected)

        def step(
            self, summed: Summed, member: Member | None, *, tiers: CheckpointTiers, described: tuple[Any, Any]
        ) -> ElasticStep:
            """Return the update that members make together, whose states are also a tier of checkpoints.

            Args:
                summed: what the update is made of.
                member: this process; None: it is alone.
                tiers: checkpoints, which one member writes.
                described: state and batch.
            """
            step = ElasticStep(summed, self.parts, member)
            if member is not None:
                tiers.memory = PeerMemory(member, step, lambda: step.prepare(*described))
                tiers.writes = member.is_leader
            return step

        def supervisor(
            self, command: Sequence[str], members: int, events: EventLog, say: Callable[[str], None]
        ) -> MemberSupervisor:
            """Return what starts members by a command."""
            return MemberSupervisor(command, members, events, MemberTimeouts(self.silence, self.patience), say)


def is_member() -> bool:
    """Return True if a supervisor has started this process."""
    return VARIABLE in os.environ


@contextlib.contextmanager
def as_member(cfg: Elastic.Config | None) -> Iterator[Member | None]:
    """Be the member that the supervisor of this process says; None: no supervisor has started it."""
    if cfg is None or not is_member():
        yield None
        return
    row = json.loads(os.environ[VARIABLE])
    member = Member(row["index"], tuple(row["address"]), row["key"].encode(), patience=cfg.patience)
    try:
        yield member
    finally:
        member.close()


class MemberGroup(ProcessGroup):
    """The one process of a member; it leads if the member does."""

    def __init__(self, member: Member):
        super().__init__("trainer")
        self._member = member

    @property
    @override
    def leader(self) -> bool:
        return self._member.is_leader()


def finish(member: Member, loop: Any) -> None:
    """Return when all members have ended after the same update; those that lack its state get it, the leader saves."""
    while not member.over:
        member.agree(loop.step, lambda: loop.step_fn.offer(loop.state))
        loop.save()
        loop.tiers.wait()
        member.finish()
        member.wait(1.0)
