"""JobSets on GKE: one for the trainer of a supervised run, or a command; one for each instance of a role of an RL run.

An instance is submitted by itself, so that a worker which is taken away restarts alone, and Kueue admits, evicts and
readmits it alone. Exit status 2 is the user's mistake and fails the JobSet; everything else restarts it.
"""

import dataclasses
from typing import Any

from tools.launch.kubernetes import fabric
from tools.launch.kubernetes.names import NODE
from tools.launch.launch import STATELESS, Launch
from tools.launch.machines.capacity import SPOT_GRACE
from tools.launch.machines.storage import MOUNT
from tools.launch.plan import LaunchPlan, Role
from tools.launch.quoting import literal
from tools.launch.script import MEETING_PORT, bootstrap, plain_environment, process_arguments

TOKEN_KEY = "ray"  # key in the Secret of a run
_GRACE = 60  # seconds, where machines are not taken away
_USER_ERROR = 2
_TPU_PORTS = {"tpu-runtime": 8471, "megascale": 8080, "metrics": 8431, "meeting": MEETING_PORT}
_POLICY = "cloud.google.com/placement-policy-name"
_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_NETWORK = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def jobsets(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> dict[str, list[dict[str, Any]]]:
    """Return the JobSets of each role; `digest`: of the bundle."""
    return {role.name: [jobset(cfg, plan, role, index, digest) for index in range(role.count)] for role in plan.roles}


def jobset(cfg: Launch.Config, plan: LaunchPlan, role: Role, index: int, digest: str) -> dict[str, Any]:
    """Return the JobSet of one instance of a role; an index beyond its count: of a worker that joins the others."""
    name = jobset_name(plan, role, index)
    restarts = cfg.kubernetes.worker_max_restarts if role.name in STATELESS else cfg.kubernetes.max_restarts
    arguments = process_arguments(cfg, plan, role, name, added=index >= role.count)
    job = _job(cfg, plan, role, _container(cfg, plan, role, arguments, digest), digest)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {**_metadata(cfg, plan, role, name, digest), **_exclusive(role)},
        "spec": {
            "network": _NETWORK,
            "failurePolicy": {
                "maxRestarts": restarts,
                "restartStrategy": "BlockingRecreate",  # two generations of Pods never share a slice
                "rules": [
                    {"name": "usersMistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                ],
            },
            "replicatedJobs": [{"name": NODE, "replicas": role.jobs, "template": {"spec": job}}],
        },
    }


def _metadata(cfg: Launch.Config, plan: LaunchPlan, role: Role, name: str, digest: str) -> dict[str, Any]:
    queue = {} if cfg.kubernetes.queue is None else {"kueue.x-k8s.io/queue-name": cfg.kubernetes.queue}
    labels = {**run_labels(cfg, plan, role, digest), **queue}
    return {"name": name, "namespace": cfg.kubernetes.namespace, "labels": labels}


def _exclusive(role: Role) -> dict[str, Any]:
    # A slice of several hosts is a node pool; those of one host may be many in a pool, and so may machines of GPUs.
    pool = role.pods > 1 and role.slices is not None and not role.slices.gpus
    return {"annotations": {_EXCLUSIVE: "cloud.google.com/gke-nodepool"}} if pool else {}


def jobset_name(plan: LaunchPlan, role: Role, index: int) -> str:
    """Return the name of an instance's JobSet."""
    return f"{plan.name}-{role.name}" + (f"-{index}" if role.name == "worker" else "")


def token_secret(run: str) -> str:
    """Return the name of the Secret with the token of an RL run's cluster."""
    return f"{run}-token"


def run_labels(cfg: Launch.Config, plan: LaunchPlan, role: Role, digest: str) -> dict[str, str]:
    """Return the labels of everything that belongs to a role of a run."""
    code = {"axl/bundle": f"axl-{digest}"} if cfg.bundle else {}
    return {"axl/run": plan.name, "axl/role": role.name, **code}


def node_selector(cfg: Launch.Config, role: Role) -> dict[str, str]:
    """Return the labels of the machines of a role."""
    if role.slices is None:
        return role.capacity.node_selector()
    policy = cfg.kubernetes.placement_policies.get(str(dataclasses.replace(role.slices, count=1)))
    placed = {} if policy is None else {_POLICY: policy}
    return {**role.slices.node_selector(), **placed, **role.capacity.node_selector()}


def machine(cfg: Launch.Config, role: Role) -> dict[str, Any]:
    """Return the fields of a Pod that say where it may run, and as whom."""
    kubernetes = cfg.kubernetes
    priority = kubernetes.worker_priority if role.name == "worker" else kubernetes.priority
    tolerations = role.capacity.tolerations()
    if role.slices is not None:
        tolerations.append({"key": role.slices.resource, "operator": "Exists", "effect": "NoSchedule"})
    return {
        "serviceAccountName": kubernetes.service_account,
        "automountServiceAccountToken": False,  # nothing in a run talks to the cluster's API
        **({} if priority is None else {"priorityClassName": priority}),
        **({"nodeSelector": selector} if (selector := node_selector(cfg, role)) else {}),
        **({"tolerations": tolerations} if tolerations else {}),
    }


def environment(cfg: Launch.Config, plan: LaunchPlan, role: Role) -> list[dict[str, Any]]:
    """Return the variables of a container; secrets are references."""
    plain = {**fabric.variables(cfg, role), **plain_environment(cfg, plan, role)}
    secret = dict(cfg.secret_env)
    if plan.command == "rl":
        secret["RAY_AUTH_TOKEN"] = f"{token_secret(plan.name)}/{TOKEN_KEY}"
    found: list[dict[str, Any]] = [{"name": name, "value": literal(value)} for name, value in plain.items()]
    for name, where in secret.items():
        owner, _, key = where.partition("/")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": owner, "key": key}}})
    return found


def _job(cfg: Launch.Config, plan: LaunchPlan, role: Role, container: dict[str, Any], digest: str) -> dict[str, Any]:
    failed = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [_USER_ERROR]}}
    found = {**cfg.place().annotations(), **fabric.annotations(cfg, role)}
    metadata = {"labels": run_labels(cfg, plan, role, digest), **({"annotations": found} if found else {})}
    return {
        "parallelism": role.pods,
        "completions": role.pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [failed]},
        "template": {"metadata": metadata, "spec": _pod(cfg, role, container)},
    }


def _pod(cfg: Launch.Config, role: Role, container: dict[str, Any]) -> dict[str, Any]:
    host = cfg.kubernetes.host_network if cfg.kubernetes.host_network is not None else role.jobs > 1
    host = host and role.slices is not None and not fabric.fabric_of(cfg, role)  # networks of the Pod then
    sidecars = fabric.sidecars(cfg, role)
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SPOT_GRACE if role.capacity.spot else _GRACE,
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if host else {}),
        **machine(cfg, role),
        **({"initContainers": sidecars} if sidecars else {}),
        "containers": [container],
        "volumes": [
            cfg.place().volume(),
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *fabric.volumes(cfg, role),
        ],
    }


def _container(cfg: Launch.Config, plan: LaunchPlan, role: Role, arguments: list[str], digest: str) -> dict[str, Any]:
    ports = {"ray": cfg.port} if role.slices is None and plan.command == "rl" else {}
    if role.slices is not None:
        ports = {"meeting": MEETING_PORT} if role.slices.gpus else _TPU_PORTS
    return {
        "name": role.name,
        "image": cfg.image,
        "command": [literal(word) for word in bootstrap(cfg, role, digest)],
        "args": [literal(word) for word in arguments],
        "env": [*environment(cfg, plan, role), *_downward(role)],
        **({"ports": [{"name": port, "containerPort": number} for port, number in ports.items()]} if ports else {}),
        "resources": _resources(cfg, plan, role),
        "securityContext": _security(role),
        "volumeMounts": [
            {"name": "runs", "mountPath": MOUNT},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *fabric.mounts(cfg, role),
        ],
    }


def _downward(role: Role) -> list[dict[str, Any]]:
    """Return what a process must know of its place; TPU_NAME tells Ray which hosts are one slice."""
    fields = {"POD_IP": "status.podIP", "AXL_SLICE": "metadata.labels['jobset.sigs.k8s.io/job-index']"}
    if role.slices is not None and not role.slices.gpus:
        fields["TPU_NAME"] = "metadata.labels['batch.kubernetes.io/job-name']"
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]


def _resources(cfg: Launch.Config, plan: LaunchPlan, role: Role) -> dict[str, Any]:
    if role.slices is None:
        cpus = cfg.kubernetes.command_cpus if plan.words else cfg.kubernetes.head_cpus
        return {"requests": {"cpu": str(cpus), "memory": f"{role.memory_gib}Gi"}}
    # A Quantity, which the official client takes as text alone.
    chips = {role.slices.resource: str(role.slices.host_chips)}
    return {"requests": chips, "limits": dict(chips)}


def _security(role: Role) -> dict[str, Any]:
    if role.slices is None:
        return {"allowPrivilegeEscalation": False}
    return {"capabilities": {"add": ["IPC_LOCK" if role.slices.gpus else "SYS_RESOURCE"]}}  # needed to lock memory
