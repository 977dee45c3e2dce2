"""A lease in the hands of a worker: its requests are drawn by an engine, then scored and submitted, or handed back."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from axlearn_like.kernels.exact.scope import numerics_of
from axlearn_like.run.events import span
from mesh import UserError
from mesh.devices import hardware_class, platform
from rl.environments.scoring import score_rollouts
from rl.protocol.messages import WHOLE, Details, Group, Lease, Prompt, Rollout, Seat
from rl.protocol.players import OWN
from rl.rollout.agent_loops.branching import Branching
from rl.rollout.request import Request, RequestOutput, draw_seed
from rl.rollout.scheduling.timeline import event_fields
from rl.rollout.worker_policy import WorkerPolicy

_EVERY = 10  # updates from one whose leases log the timeline of a program to the next


class RequestEngine(Protocol):
    """An engine, as far as a lease needs it."""

    cfg: Any

    def submit(self, request: Request) -> int:
        """Queue a request; returns its number."""
        ...

    def abort(self, number: int) -> None:
        """End a request."""
        ...


class LeasedWork:
    """The work of one lease: `begin`, then `take` and `renew` until it is drawn, `collect`, `generated`, `deliver`.

    Attributes:
        lease: the lease, with the partial rollouts that can be continued.
        revoked: it has gone to another worker.
        begun: its requests are in the engine, or were.
        rollouts: those collected, in the lease's order; some are cut if their requests were aborted.
    """

    def __init__(self, lease: Lease, policy: WorkerPolicy[Any], worker: str):
        if (episodes := policy.features.episodes) is not None:
            lease = dataclasses.replace(lease, partial=episodes.continuable(lease.partial))
        self.lease, self.policy, self._worker = lease, policy, worker
        self._clock = policy.services.events.clock
        self.revoked, self.begun = False, False
        self.rollouts: list[Rollout] = []
        self._given: dict[int, list[Rollout]] = {}  # request number -> rollouts beside those that are drawn
        self._found: dict[int, tuple[Rollout, ...]] = {}
        self._renewed = self._clock()
        self._unsubmitted = False  # generated, and not submitted yet
        self._hardware = ""

    @property
    def event(self) -> str:
        """The name of its span in the event log."""
        if self.lease.again:
            return "audit"
        return "evaluate" if self.lease.evaluation else "generate"

    @property
    def drawn(self) -> bool:
        """True when all of its requests have ended."""
        return self.begun and len(self._found) == len(self._given)

    def shares_episodes(self, other: "LeasedWork") -> bool:
        """Return True if a problem with episodes of one policy is in both: their records are kept by problem."""
        problems = {prompt.id for prompt in self.lease.prompts}
        shared = problems.intersection(prompt.id for prompt in other.lease.prompts)
        return bool(shared) and self.policy is other.policy and self.policy.features.episodes is not None

    @property
    def seats(self) -> tuple[Seat, ...]:
        """The policies and versions that draw it: its own and those consulted, or one for each role of its episodes."""
        return self.lease.seats or (Seat(OWN, self.lease.policy, self.lease.version, self.lease.incarnation),)

    def begin(
        self, engine: RequestEngine, adapter: str | None = None, policies: Mapping[str, str | None] | None = None
    ) -> None:
        """Submit its requests, to be drawn by `adapter` (None: the base), with `policies` that they may consult."""
        features, lease, policy = self.policy.features, self.lease, self.policy
        self.begun, self._hardware = True, _hardware(engine)
        ask = Request if features.episodes is None else features.episodes.request
        if (steered := features.interruption or features.graph) is not None:
            ask = steered.request
        if (branching := self._branching) is not None:
            ask = branching.request
        for index, prompt in enumerate(lease.prompts):
            partial = tuple(r for r in lease.partial if r.prompt_id == prompt.id)
            seed = draw_seed(policy.seed, prompt.draw)
            if lease.again and branching is None:  # else all are drawn, for samples share tokens
                partial = tuple(_undrawn(prompt, sample) for sample in lease.samples_of(prompt))
            given = self._demonstrations(prompt)
            request = ask(prompt, lease.samples - len(given), seed, partial=partial)
            earlier = lease.earlier[index] if lease.earlier else ()
            by = {"adapter": adapter, "policies": policies or {}, "sampler": policy.sampler}
            request = dataclasses.replace(request, earlier=earlier, **by)
            self._given[engine.submit(request)] = given
        self._renewed = self._clock()

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """Take those of an engine's outputs that are of its requests."""
        mine = [one for one in outputs if one.number in self._given]
        if mine and not self._found:
            self._log_program(mine[0])
        self._found |= {one.number: self._rollouts(one) for one in mine}

    def _log_program(self, output: RequestOutput) -> None:
        """Log the timeline of a sample, for a lease of some of the updates."""
        lease, fields = self.lease, event_fields(output.lanes)
        if fields is not None and lease.step % _EVERY == 0 and not (lease.evaluation or lease.again):
            self.policy.services.events.append(self._worker, "program", step=lease.step, lease=lease.id, **fields)

    def _rollouts(self, output: RequestOutput) -> tuple[Rollout, ...]:
        if (graph := self.policy.features.graph) is None:
            return output.rollouts
        return graph.recorded(output.rollouts) if self.lease.evaluation else graph.trained(output)

    def renew(self) -> None:
        """Renew the lease if a good part of its time is over."""
        if self._clock() - self._renewed > self.lease.seconds / 4:
            self.revoked = not self.policy.services.controller.renew(self.lease.id)
            self._renewed = self._clock()

    def abort(self, engine: RequestEngine) -> None:
        """End its requests; nothing more is taken of them."""
        for number in self._given.keys() - self._found.keys():
            engine.abort(number)

    def collect(self) -> dict[str, Any]:
        """Put its rollouts together, once all requests have ended; returns figures of the drawing."""
        lease, episodes = self.lease, self.policy.features.episodes
        rollouts = [rollout for number, given in self._given.items() for rollout in (*self._found[number], *given)]
        if episodes is not None:
            rollouts = episodes.recorded(rollouts, lease.partial, again=lease.rerun)
        if lease.again:
            rollouts = [rollout for rollout in rollouts if rollout.sample_id in lease.again[rollout.prompt_id]]
        self.rollouts = rollouts
        drawn = sum(len(r.tokens) for r in rollouts if not r.demonstration)
        figures = {"tokens": drawn - sum(len(r.tokens) for r in lease.partial), "rollouts": len(rollouts)}
        if recorded := sum(r.routing.nbytes for r in rollouts if r.routing is not None):
            figures["routing_bytes"] = recorded
        return figures

    def generated(self) -> bool:
        """Report that its rollouts exist; False if the lease is void (UserError: some did not end by themselves)."""
        check_whole(self.rollouts)
        self._unsubmitted = self.policy.services.controller.generated(self.lease.id)
        return self._unsubmitted

    def deliver(self) -> bool:
        """Score its rollouts and submit them; returns False if they came too late."""
        accepted = self.policy.services.controller.submit(self.lease.id, self._score())
        self._unsubmitted = False
        return accepted

    def hand_back(self) -> None:
        """Give the rollouts back, for another worker to continue; of a lease that has not begun, those it came with."""
        lease, rollouts = self.lease, self.rollouts if self.begun else self.lease.partial
        if (branching := self._branching) is not None:
            rollouts = branching.continuable(rollouts, lease.samples)
        if self.policy.features.graph is not None:
            rollouts = ()  # plans whose nodes are gone begin again
        if all(rollout.finish_reason != "error" for rollout in rollouts):
            self.policy.services.controller.hand_back(lease.id, tuple(r for r in rollouts if not r.demonstration))

    def abandon(self) -> None:
        """Hand back rollouts that are whole and not submitted; another thread may call it."""
        if self._unsubmitted:
            self.hand_back()

    @property
    def _branching(self) -> Branching | None:
        return None if self.lease.evaluation else self.policy.features.branching

    def _demonstrations(self, prompt: Prompt) -> list[Rollout]:
        demonstrations = self.policy.features.demonstrations
        if demonstrations is None or self.lease.evaluation or self.lease.again:
            return []
        return demonstrations.rollouts(prompt, self.lease.samples, self.lease.version)

    def _score(self) -> tuple[Group, ...]:
        lease, rollouts, policy = self.lease, self.rollouts, self.policy
        with span(policy.services.events, self._worker, "score", step=lease.step) as fields:
            wanted = bool(policy.features.wants & {"tokens", "finish_reason"})
            details = [_details(rollout) for rollout in rollouts] if wanted else None
            answers, scores = score_rollouts(policy.services.verifier, rollouts, policy.tokenizer, details)
            if failed := [score for score in scores if score.status != "ok"]:
                why = f"{failed[-1].status}: {failed[-1].error}"
                fields |= {"answers": len(scores), "failed": len(failed), "error": why}
        if lease.evaluation:  # nobody replays it
            rollouts = [dataclasses.replace(rollout, routing=None, candidate_tokens=None) for rollout in rollouts]
        nodes = Counter(rollout.prompt_id for rollout in rollouts if rollout.node is not None)
        ends = itertools.accumulate(len(lease.samples_of(prompt)) + nodes[prompt.id] for prompt in lease.prompts)
        parts = [slice(*part) for part in itertools.pairwise((0, *ends))]
        return tuple(
            Group(prompt, tuple(rollouts[part]), tuple(scores[part]), self._hardware)
            for prompt, part in zip(lease.prompts, parts, strict=True)
        )


def _hardware(engine: RequestEngine) -> str:
    """Return the class of hardware whose bits an engine has; "" where they depend on the batch, too."""
    model = engine.cfg.model
    alone = platform() == "cpu" and getattr(model, "dtype", "float32") == "float32"
    return hardware_class() if alone or numerics_of(model) == "exact" else ""


def _undrawn(prompt: Prompt, sample: int) -> Rollout:
    """Return a rollout without tokens, to be continued."""
    ids, numbers = np.empty(0, np.int32), np.empty(0, np.float32)
    return Rollout(prompt.id, sample, ids, numbers, ids, np.empty(0, bool), "abort")


def _details(rollout: Rollout) -> Details:
    return {"tokens": rollout.tokens.tolist(), "finish_reason": rollout.finish_reason}


def check_whole(rollouts: Sequence[Rollout]) -> None:
    """Refuse rollouts that did not end by themselves: their logits are no numbers (UserError: names the first)."""
    for rollout in rollouts:
        if rollout.finish_reason not in WHOLE:
            raise UserError(
                f"prompt {rollout.prompt_id}, sample {rollout.sample_id}: drawing ended with {rollout.finish_reason!r} "
                f"after {len(rollout.tokens)} tokens; are the policy's weights all numbers? (A learning rate that is "
                "too high, or no clipping, are the usual causes.)"
            )
