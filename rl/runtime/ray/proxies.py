"""Proxies of roles that run in actors: roles call each other by plain method calls.

Weights do not travel through these calls, but over connections of their own (see rl/parameter_server/transport).
"""

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.experiment import RLExperiment
from rl.parameter_server.client import ParameterServerClient, connect
from rl.parameter_server.transport.endpoint import Endpoint
from rl.protocol.timeouts import Timeouts, Waits
from rl.runtime.policies.runs import ByPolicy
from rl.runtime.supervision.names import REFERENCE, server_names

CALL_MARGIN = 60.0  # seconds that a call may last beyond the time after which an unresponsive role is killed


class RoleGone(UserError):
    """A role has ended and will not come back."""


def result(reference: Any, timeout: float | None = None) -> Any:
    """Call `ray.get`, and raise an error of the actor as the actor raised it, without Ray's wrapping."""
    try:
        return ray.get(reference, timeout=timeout)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, UserError) else error.as_instanceof_cause()
        raise cause from None


def invoke_beside(actor: Any, name: str, *args: Any) -> Any:
    """Start a call that is answered whatever else the actor does; returns its reference."""
    return actor.invoke.options(concurrency_group="health").remote(name, *args)


class RemoteRole:
    """A role that runs in an actor: its methods, called synchronously.

    A long call is logged as an event of the caller. A call waits up to `timeouts.restart` seconds for an actor that is
    being restarted, and waits for one that does not answer until the driver has killed it; then the error names the
    role.
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        timeouts: Timeouts.Config,
        *,
        limit: float | None = None,
        caller: str = "driver",
        events: EventLog | None = None,
        over: Callable[[], bool] = lambda: False,
        term: int = 0,
    ):
        """`limit`: seconds that a call may take beyond its own `timeout`. `over()`: the run is over.

        `term`: number of the trainer that calls.
        """
        self._name, self._actor, self._timeouts = name, actor, timeouts
        self._limit = timeouts.unresponsive + CALL_MARGIN if limit is None else limit
        self._caller, self._events, self._over = caller, events, over
        self._policy, self._term = "", term

    def of(self, policy: str) -> "RemoteRole":
        """Return the role of a policy, where the actor has one for each of several."""
        role = copy.copy(self)
        role._policy = policy
        return role

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            whole = method, args, kwargs, self._policy, self._term
            return self._call(method, lambda: self._actor.invoke.remote("call", *whole), kwargs.get("timeout", 0.0))

        return call

    def endpoint(self) -> Endpoint:
        """Return where the process of a parameter server that is alive now listens; other roles connect to it."""
        return self._call("endpoint", lambda: self._actor.invoke.remote("endpoint", self._policy))

    def _call(self, method: str, start: Callable[[], Any], wait: float = 0.0) -> Any:
        waits, give_up = Waits(self._timeouts.warn_after + wait), None
        waits.begin(method)
        while True:
            try:
                return self._answer(start(), method, waits, self._limit + wait)
            except RayActorError as error:
                if self._over():
                    raise RoleGone(f"{self._name} is gone: {error}") from error
                give_up = give_up or time.monotonic() + self._timeouts.restart
                if time.monotonic() > give_up:
                    raise UserError(
                        f"{self._name} died and has not restarted within {self._timeouts.restart:g} s "
                        f"(timeouts.restart): {error}"
                    ) from error
                self._report(method, waits, "to restart")
                time.sleep(0.2)

    def _answer(self, reference: Any, method: str, waits: Waits, limit: float) -> Any:
        give_up = time.monotonic() + limit
        while (left := give_up - time.monotonic()) > 0:
            if ray.wait([reference], timeout=min(1.0, left))[0]:
                return result(reference)
            self._report(method, waits, f"to answer ({method})")
        raise UserError(f"{self._name}.{method} has not answered for {limit:.0f} s")

    def _report(self, method: str, waits: Waits, what: str) -> None:
        if self._events is not None and waits.due(method):
            seconds = round(waits.begin(method), 1)
            self._events.append(self._caller, "waiting", who=self._caller, what=f"{self._name} {what}", seconds=seconds)


def connect_reference(caller: str, actors: dict[str, Any], cfg: RLExperiment.Config, events: EventLog) -> Any:
    """Connect `caller` to the reference's leader, whose answers may await a compilation; None: there is none."""
    if REFERENCE not in actors:
        return None
    limit = cfg.timeouts.batch
    return RemoteRole(REFERENCE, actors[REFERENCE], cfg.timeouts, limit=limit, caller=caller, events=events)


@dataclasses.dataclass(frozen=True)
class Services:
    """The roles that a worker or a trainer calls, by policy where there are several ("": the only one)."""

    controller: Any
    weights: dict[str, ParameterServerClient]
    verifiers: dict[str, Any]


def connect_services(
    caller: str,
    actors: dict[str, Any],
    cfg: RLExperiment.Config,
    events: EventLog,
    over: Callable[[], bool] = lambda: False,
    term: int = 0,
) -> Services:
    """Connect `caller`, a trainer of number `term` if it is one, to controller, parameter server and verifier."""
    timeouts, known = cfg.timeouts, {"caller": caller, "events": events, "over": over}
    controller = RemoteRole("controller", actors["controller"], timeouts, term=term, **known)
    verifier = RemoteRole("verifier", actors["verifier"], timeouts, limit=timeouts.batch, **known)
    names = server_names(cfg)
    servers = [RemoteRole(name, actors[name], timeouts, **known) for name in names]

    def on_wait(shard: int, what: str, seconds: float) -> None:
        events.append(caller, "waiting", who=caller, what=f"{names[shard]} {what}", seconds=round(seconds, 1))

    def weights(policy: str) -> ParameterServerClient:
        return connect(
            cfg.parameter_server,
            [server.of(policy).endpoint for server in servers],
            on_wait=on_wait,
            warn_after=timeouts.warn_after,
            advertised_host=ray.util.get_node_ip_address(),
        )

    policies = list(cfg.policies) or [""]
    return Services(
        controller,
        weights=ByPolicy(policies, weights),
        verifiers=ByPolicy(policies, verifier.of),
    )
