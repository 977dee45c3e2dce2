"""A RayJob for KubeRay: the head runs the experiment's command, slices and GPUs are groups of workers; or a RayCluster.

Slices of several hosts need Google's webhook for TPUs under Ray, or KubeRay's gate RayMultiHostIndexing, to number
their hosts. KubeRay makes the token of the cluster, and starts Ray itself, so the image must have what a run needs.

A RayCluster (`kubernetes.ray_cluster`) outlives its runs, each of which is a RayJob that brings its own code.
"""

import dataclasses
from importlib.metadata import version
from typing import Any

from mesh import UserError
from tools.launch.kubernetes.fabric import fabric_of
from tools.launch.kubernetes.jobset import environment, machine, run_labels
from tools.launch.launch import STOCK_IMAGE, Launch
from tools.launch.machines.capacity import SPOT_GRACE
from tools.launch.machines.storage import MOUNT
from tools.launch.plan import LaunchPlan, Role
from tools.launch.quoting import as_yaml, literal, shell
from tools.launch.script import CODE, EXECUTABLES, UNPACK, axl_command, bundle_path, code_folder

_SELECTOR = "ray.io/cluster"
_ENDED = {"Complete": "Completed", "Failed": "Failed", "ValidationFailed": "Failed"}


def rayjob(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> dict[str, Any]:
    """Return the RayJob of an RL run.

    Raises:
        UserError: a supervised run, which has no use for Ray, or an image without Ray.
    """
    if plan.command != "rl":
        what = f"`axl {plan.command}`" if plan.words else f"{cfg.experiment} is no RL experiment, and"
        raise UserError(f"--on ray: {what} needs no Ray; use --on gke")
    cfg.require(
        "image", cfg.image != STOCK_IMAGE, "an image with ray and jax for its devices, for KubeRay installs nothing"
    )
    for role in plan.roles:
        if fabric_of(cfg, role) is not None:
            raise UserError(
                f"--on ray: {role.name} on {role.slices}: NCCL's settings are made by --on gke alone; use that"
            )
    cluster, command = cfg.kubernetes.ray_cluster, axl_command(cfg, plan)
    ends = {"shutdownAfterJobFinishes": True} if cluster is None else {}
    own: dict[str, Any] = {
        "entrypoint": _entrypoint(command),
        **ends,
        "backoffLimit": 0,
    }  # the driver restarts roles by itself
    if cluster is None:
        own["rayClusterSpec"] = _cluster(cfg, plan, digest)
    else:
        own |= {"clusterSelector": {_SELECTOR: cluster}, **_code(cfg, plan, digest)}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {
            "name": plan.name,
            "namespace": cfg.kubernetes.namespace,
            "labels": {**run_labels(cfg, plan, plan.roles[0], digest), **({} if cluster is not None else _queue(cfg))},
        },
        "spec": own,
    }


def raycluster(cfg: Launch.Config, plan: LaunchPlan) -> dict[str, Any]:
    """Return the RayCluster of `kubernetes.ray_cluster`, with the machines of this run; it has no code of any run."""
    name = cfg.kubernetes.ray_cluster
    assert name is not None
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name, "namespace": cfg.kubernetes.namespace, "labels": _queue(cfg)},
        "spec": _cluster(cfg.clone(bundle=False, compile=False), dataclasses.replace(plan, name=name), ""),
    }


def _cluster(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> dict[str, Any]:
    head, *others = plan.roles
    return {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {}, "template": _template(cfg, plan, head, digest)},
        "workerGroupSpecs": [_group(cfg, plan, role, digest) for role in others],
    }


def _queue(cfg: Launch.Config) -> dict[str, str]:
    return {} if cfg.kubernetes.queue is None else {"kueue.x-k8s.io/queue-name": cfg.kubernetes.queue}


def _code(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> dict[str, Any]:
    """Return the fields by which a run brings its code to a cluster that is there: a folder of the storage."""
    if not cfg.bundle:
        return {}
    folder, archive = code_folder(cfg, digest), bundle_path(cfg, digest)
    command = ["bash", "-c", UNPACK, "axl", str(folder), str(archive), *axl_command(cfg, plan, str(folder))]
    variables = {"PYTHONPATH": str(folder)}
    if cfg.compile:
        variables["AXL_EXECUTABLES"] = f"{folder}/{EXECUTABLES}"
    return {"entrypoint": _entrypoint(command), "runtimeEnvYAML": as_yaml({"env_vars": variables})}


def _entrypoint(command: list[str]) -> str:
    """Return a command for KubeRay: a shell of its Pod that submits reads it, whose argument the kubelet has expanded.

    Source: ray-operator/controllers/ray/common/job.go of KubeRay. Ray quotes the words again for the head's shell.
    """
    return literal(shell(*command))


def rayjobs(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> dict[str, list[dict[str, Any]]]:
    """Return the RayJob of a run, after the RayCluster on which it runs if that is to outlive it."""
    found = {"rayjob": [rayjob(cfg, plan, digest)]}
    return found if cfg.kubernetes.ray_cluster is None else {"raycluster": [raycluster(cfg, plan)], **found}


def as_jobset(found: dict[str, Any]) -> dict[str, Any]:
    """Return a RayJob of the cluster in the form of a JobSet, for its status."""
    given: dict[str, Any] = found.get("status", {})
    state, message = given.get("jobDeploymentStatus", ""), given.get("message", "")
    status: dict[str, Any] = {"restarts": max(0, given.get("failed", 0))}
    if state in _ENDED:
        reason = given.get("reason") or given.get("jobStatus") or state
        condition = {"type": _ENDED[state], "status": "True", "reason": reason, "message": message}
        status |= {"terminalState": _ENDED[state], "conditions": [condition]}
    elif state != "Running":
        waits = f"KubeRay: {state or 'not seen yet'}{': ' if message else ''}{message}"
        status["conditions"] = [{"type": "Waiting", "status": "True", "message": waits}]
    return {"metadata": found["metadata"], "spec": {"suspend": found["spec"].get("suspend", False)}, "status": status}


def of_rayjob(pod: dict[str, Any], run: str) -> dict[str, Any]:
    """Return a Pod; one of KubeRay's has the name of the RayJob where those of a JobSet have its name."""
    if "ray.io/cluster" in (labels := pod["metadata"].get("labels", {})):
        labels.setdefault("jobset.sigs.k8s.io/jobset-name", run)
    return pod


def _group(cfg: Launch.Config, plan: LaunchPlan, role: Role, digest: str) -> dict[str, Any]:
    count = role.count * role.jobs
    return {
        "groupName": role.name,
        **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), count),
        "numOfHosts": role.pods,
        "rayStartParams": {},
        "template": _template(cfg, plan, role, digest),
    }


def _template(cfg: Launch.Config, plan: LaunchPlan, role: Role, digest: str) -> dict[str, Any]:
    mounts = [{"name": "runs", "mountPath": MOUNT}]
    volumes = [cfg.place().volume()]
    if cfg.bundle:
        mounts.append({"name": "code", "mountPath": CODE})
        volumes.append({"name": "code", "emptyDir": {}})
    container: dict[str, Any] = {
        "name": f"ray-{role.name}",
        "image": cfg.image,
        # KubeRay sets the token of the cluster that it starts.
        "env": [one for one in environment(cfg, plan, role) if not one["name"].startswith("RAY_AUTH_")],
        "resources": _resources(cfg, role),
        "volumeMounts": mounts,
    }
    unpack = {
        "name": "code",
        "image": cfg.image,
        "command": ["tar", "-xzf", literal(str(bundle_path(cfg, digest))), "-C", CODE],
        "volumeMounts": mounts,
    }
    annotations = cfg.place().annotations()
    return {
        "metadata": {
            "labels": run_labels(cfg, plan, role, digest),
            **({"annotations": annotations} if annotations else {}),
        },
        "spec": {
            **({"terminationGracePeriodSeconds": SPOT_GRACE} if role.capacity.spot else {}),
            **machine(cfg, role),
            **({"initContainers": [unpack]} if cfg.bundle else {}),
            "containers": [container],
            "volumes": volumes,
        },
    }


def _resources(cfg: Launch.Config, role: Role) -> dict[str, Any]:
    if role.slices is None:
        wanted: dict[str, Any] = {"cpu": str(cfg.kubernetes.head_cpus), "memory": f"{role.memory_gib}Gi"}
    else:
        wanted = {role.slices.resource: str(role.slices.host_chips)}
    return {"requests": wanted, "limits": dict(wanted)}  # KubeRay takes the limits for Ray's resources
