"""A RayJob for KubeRay: the head runs the experiment's command, TPU slices are groups of workers.

Slices of several hosts need Google's webhook for TPUs under Ray, or KubeRay's gate RayMultiHostIndexing, to number
their hosts. KubeRay makes the token of the cluster, and starts Ray itself, so the image must have what a run needs.
"""

from importlib.metadata import version
from typing import Any

from mesh import UserError
from tools.launch.kubernetes.jobset import environment, machine, run_labels
from tools.launch.launch import STOCK_IMAGE, Launch
from tools.launch.machines.capacity import SPOT_GRACE
from tools.launch.machines.storage import MOUNT
from tools.launch.plan import LaunchPlan, Role
from tools.launch.script import CODE, axl_command, bundle_path, words


def rayjob(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> dict[str, Any]:
    """Return the RayJob of an RL run.

    Raises:
        UserError: a supervised run, which has no use for Ray, or an image without Ray.
    """
    if plan.command != "rl":
        what = f"`axl {plan.command}`" if plan.words else f"{cfg.experiment} is no RL experiment, and"
        raise UserError(f"--on ray: {what} needs no Ray; use --on gke")
    cfg.require("image", cfg.image != STOCK_IMAGE, "an image with ray and jax[tpu], for KubeRay installs nothing")
    queue = {} if cfg.kubernetes.queue is None else {"kueue.x-k8s.io/queue-name": cfg.kubernetes.queue}
    head, *others = plan.roles
    command = words(axl_command(cfg, plan))
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {
            "name": plan.name,
            "namespace": cfg.kubernetes.namespace,
            "labels": {**run_labels(cfg, plan, head, digest), **queue},
        },
        "spec": {
            "entrypoint": command,
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 0,  # the driver restarts roles by itself
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": {}, "template": _template(cfg, plan, head, digest)},
                "workerGroupSpecs": [_group(cfg, plan, role, digest) for role in others],
            },
        },
    }


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
        "command": ["/bin/sh", "-c", f"tar -xzf {bundle_path(cfg, digest)} -C {CODE}"],
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
        wanted = {"google.com/tpu": role.slices.host_chips}
    return {"requests": wanted, "limits": dict(wanted)}  # KubeRay takes the limits for Ray's resources
