"""Actors of the roles: their environment, and their place in the Ray cluster."""

import os
import pickle
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from axlearn_like.config import reach
from axlearn_like.config.consent import VARIABLE as CONSENT
from axlearn_like.config.consent import passed_on
from axlearn_like.config.trusted_code import VARIABLE as CODE_VARIABLE
from axlearn_like.run.directory import RunDirectory
from rl.experiment import RLExperiment
from rl.fleet.requests import MEMORY_FRACTION, OLD_MEMORY_FRACTION
from rl.runtime.node.local_ray import side
from rl.runtime.ray.actors import RoleActor
from rl.runtime.ray.devices.capacity import role_selector
from rl.runtime.ray.devices.reservation import Slot
from rl.runtime.supervision.names import REFERENCE, process_groups, spare_names

SERVICES = ("controller", "parameter_server", "verifier")  # kinds of roles that others call; they use no accelerator
_INHERITED = (
    "JAX_PLATFORMS",
    "JAX_NUM_CPU_DEVICES",
    "XLA_FLAGS",
    MEMORY_FRACTION,
    OLD_MEMORY_FRACTION,
    "AXL_COMPILATION_CACHE",
    CODE_VARIABLE,
)


def start_actor(
    cfg: RLExperiment.Config,
    run: RunDirectory,
    kind: str,
    name: str,
    slot: Slot | None,
    *,
    token: str,
    namespace: str,
    raylets: int,
) -> Any:
    """Start the actor of a role; Ray restarts it whenever its process ends.

    Args:
        kind: "trainer", "worker", "reference", or one of `SERVICES`.
        slot: where it starts, with devices of its own; None: it is assigned to a node, and uses what that shows.
        namespace: under which the actor is found by its name.
        raylets: raylets that the command keeps for its drivers, which the actor outlives; 0: it ends with this one.
    """
    place = (_side if raylets > 1 else _node)(cfg, kind, name) | ({} if slot is None else slot.options())
    if kind in SERVICES and (own := role_selector("head")):
        place["label_selector"] = own  # keeps services off machines that may be taken away
    callers = {**dict.fromkeys(SERVICES, cfg.workers), REFERENCE: cfg.trainer.processes}.get(kind)
    concurrency = 8 if callers is None else 32 + 4 * callers  # each has a call or two under way
    remote: Any = ray.remote  # annotations of Ray lack concurrency groups
    actor = remote(concurrency_groups={"health": 1}, max_concurrency=concurrency)(RoleActor).options(
        name=name,
        namespace=namespace,
        lifetime="detached" if raylets else None,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        **place,
    )
    known = {"kind": kind, "name": name, "run_path": str(run.path), "token": token, "namespace": namespace}
    request = None if slot is None else slot.request
    arguments = {**known, "grace": cfg.timeouts.grace, "request": request}
    variables = {**_environment(kind, slot), CONSENT: passed_on(reach(cfg))}
    return actor.remote(variables, pickle.dumps(arguments))


def _side(cfg: RLExperiment.Config, kind: str, name: str) -> dict[str, Any]:
    """Assign processes to two raylets of this machine: a spare has another one than the process that it replaces.

    A service starts again beside the other raylet, at once; the others wait for their own, which is back soon.
    """
    spare = name in sum(spare_names(cfg).values(), [])
    number = int(name.rpartition("-")[2]) if kind == "worker" else 0
    own = (number + (spare or kind in SERVICES)) % 2
    place: dict[str, Any] = {"label_selector": side(own)}
    return place | ({"fallback_strategy": [{"label_selector": side(1 - own)}]} if kind in SERVICES else {})


def _node(cfg: RLExperiment.Config, kind: str, name: str) -> dict[str, Any]:
    """Assign processes without own devices to nodes in turn, or others when lost; Ray's SPREAD is random."""
    names = [name for group in process_groups(cfg).get(kind, []) for name in group]
    if name in sum(spare_names(cfg).values(), []):
        return {
            "scheduling_strategy": "SPREAD"
        }  # another node than that of the process which it replaces, if there is one
    if not names or (kind != "worker" and len(names) == 1):
        return {"scheduling_strategy": "DEFAULT"}
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    own = nodes[names.index(name) % len(nodes)]
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(own, soft=True)}


def _environment(kind: str, slot: Slot | None) -> dict[str, str]:
    """Return the variables that an actor inherits; a role without device work must not open the accelerator."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    if kind in SERVICES:
        inherited["JAX_PLATFORMS"] = "cpu"
    return inherited if slot is None else inherited | slot.request.environment(os.environ)
