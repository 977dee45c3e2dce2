"""The memory of the other members as a tier of checkpoints: a process that comes takes its state from there."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from axlearn_like.elastic.member import Changed, Member
from axlearn_like.elastic.update import MemberStep
from mesh.errors import UserError


class PeerMemory:
    """States that other members have (a `checkpoint.tiers.MemoryTier`)."""

    frozen: Collection[str] = ()  # paths of arrays that no update changes; they are sent like the others

    def __init__(self, member: Member, step: MemberStep, prepare: Callable[[], None]):
        """Take the step, which offers states, and what compiles it before the others wait for this member."""
        self._member, self._step, self._prepare = member, step, prepare
        self._joined = False

    def latest_step(self) -> int | None:
        """Join the others, and return the updates of their state; None: none has a state, the checkpoint counts."""
        if not self._joined:
            self._prepare()
            self._member.join()
            self._joined = True
        return self._member.agree(None).newest

    def restore(self, abstract: Mapping[str, Any], step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (state, extras) of `step` from those that have it (UserError: they are gone)."""
        while (view := self._member.agree(None)).newest == step:
            try:
                sent = self._member.fetch(view)
            except Changed:
                continue
            return self._step.received(sent, abstract), sent.extras["extras"]
        raise UserError(f"the members that had the state of step {step} were lost before this one had it")

    def hold(self, step: int, state: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        """Keep the extras of a state; the state itself is there."""
        self._step.extras = dict(extras)
