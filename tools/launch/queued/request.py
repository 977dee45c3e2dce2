"""A queued resource as it is asked for: all slices of a run as one unit, each machine with the same startup script.

The API is of July 2026: https://docs.cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources
"""

from typing import Any

from mesh import UserError
from tools.launch.launch import Launch
from tools.launch.machines.storage import FUSE_OPTIONS, MOUNT
from tools.launch.plan import LaunchPlan, Role
from tools.launch.queued.keeper import LABEL
from tools.launch.quoting import shell
from tools.launch.script import CODE, MEETING_PORT, axl_command, bootstrap, run_dir

_TYPES = {"v4": "V4", "v5e": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E"}
_BROKEN = 30  # containers that did not start, 10 s apart: a registry may be away for some minutes
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes"


def only_role(cfg: Launch.Config, plan: LaunchPlan) -> Role:
    """Return the role that a queued resource runs, trainer or command.

    Raises:
        UserError: it cannot run on queued resources.
    """
    if plan.command == "rl":
        raise UserError(
            f"--on queued-resource: {cfg.experiment} is an RL experiment, whose head needs a name that stays, and "
            "a Secret for its token, which queued resources have not; use --on gke, or --on local to try it"
        )
    (role,) = plan.roles
    cfg.require("devices", role.slices is not None, "--tpu KIND:SHAPE with --on queued-resource")
    assert role.slices is not None
    kind = role.slices.kind
    if kind not in _TYPES:
        there = ", ".join(_TYPES)
        raise UserError(f"{role.slices}: the Cloud TPU API does not sell {kind}; there are {there}, or --on gke")
    cfg.require("storage", cfg.place().bucket, "gs://BUCKET/FOLDER with --on queued-resource")
    cfg.require("secret_env", not cfg.secret_env, "none with --on queued-resource: no Secrets are there")
    cfg.tpu_api.require("project", bool(cfg.tpu_api.project), "the name of a project, with --on queued-resource")
    cfg.tpu_api.require("zone", bool(cfg.tpu_api.zone), "a zone, such as us-east5-a, with --on queued-resource")
    return role


def parent(cfg: Launch.Config) -> str:
    """Return project and zone as the API names them."""
    return f"projects/{cfg.tpu_api.project}/locations/{cfg.tpu_api.zone}"


def queued_resource(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> dict[str, Any]:
    """Return the body of a request for all slices of a run.

    Raises:
        UserError: the API has no word for what the run asks for.
    """
    role, api = only_role(cfg, plan), cfg.tpu_api
    assert role.slices is not None
    slices = role.slices.count
    labels = {LABEL: plan.name, **({"axl-bundle": digest} if digest else {})}
    node: dict[str, Any] = {
        "acceleratorConfig": {"type": _TYPES[role.slices.kind], "topology": role.slices.shape},
        "runtimeVersion": role.slices.accelerator.runtime,
        "labels": labels,
        "metadata": {"startup-script": startup_script(cfg, plan, digest)},
        "networkConfig": {"network": api.network, "enableExternalIps": api.external_addresses},
    }
    if api.service_account is not None:
        node["serviceAccount"] = {"email": api.service_account, "scope": [_SCOPE]}
    if role.capacity.kind == "reserved":
        node["schedulingConfig"] = {"reserved": True}
    name = {"nodeId": plan.name}
    if slices > 1:
        name = {"multisliceParams": {"nodeCount": slices, "nodeIdPrefix": plan.name}}
    spec = {"parent": parent(cfg), **name, "node": node}
    waits = {} if api.wait_hours is None else {"queueingPolicy": {"validUntilDuration": f"{api.wait_hours * 3600:g}s"}}
    return {"tpu": {"nodeSpec": [spec]}, **role.capacity.tpu_api(api.project or "", api.zone or ""), **waits}


def startup_script(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> str:
    """Return the script that every machine runs when it starts, again after maintenance: storage, rank, container."""
    role, place = only_role(cfg, plan), cfg.place()
    assert role.slices is not None
    arguments = ["command" if plan.words else "train", "--name", f"{plan.name}-{role.name}"]
    arguments += ["--run-dir", str(run_dir(cfg, plan))]
    arguments += ["--hosts", str(role.pods), "--slices", str(role.jobs), "--chips", str(role.slices.host_chips)]
    arguments += ["--folder", str(place.path)] if plan.words else []
    variables = {
        "PYTHONUNBUFFERED": "1",
        "AXL_COMPILATION_CACHE": str(place.path / "compilation-cache"),
        **({"PYTHONPATH": CODE} if cfg.bundle else {}),
        **cfg.env,
    }
    several = role.jobs * role.pods > 1
    meet = ["--meet", '"$FIRST:' + str(MEETING_PORT) + '"'] if several else []
    run = [
        *("docker run --rm --name axl --privileged --net=host --ulimit memlock=-1 --shm-size=16g".split()),
        *("-v", f"{MOUNT}:{MOUNT}", "-e", '"JOB_COMPLETION_INDEX=$INDEX"', "-e", '"AXL_SLICE=$SLICE"'),
        *(part for name, value in variables.items() for part in ("-e", shell(f"{name}={value}"))),
        *(shell(cfg.image, *bootstrap(cfg, role, digest), *arguments), *meet, "--", shell(*axl_command(cfg, plan))),
    ]
    delete = ["gcloud", "compute", "tpus", "queued-resources", "delete", plan.name, "--force", "--quiet", "--async"]
    delete += ["--project", cfg.tpu_api.project or "", "--zone", cfg.tpu_api.zone or ""]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {plan.name}: a process of the run on each machine; started again by whatever ends it but 0 and 2.",
            "set -uo pipefail",
            f'read_metadata() {{ curl -sf -H "Metadata-Flavor: Google" "{_METADATA}/$1"; }}',
            "read_tpu() { read_metadata tpu-env | sed -n \"s/^$1: *'\\{0,1\\}\\([^']*\\)'\\{0,1\\}$/\\1/p\"; }",
            "until INDEX=$(read_metadata agent-worker-number); do sleep 2; done",
            "SLICE=$(read_tpu MEGASCALE_SLICE_ID); SLICE=${SLICE:-0}",
            "FIRST=$(read_tpu MEGASCALE_COORDINATOR_ADDRESS); FIRST=${FIRST%%:*}",
            # `id:state:address` of each machine of this slice.
            '[ -n "$FIRST" ] || FIRST=$(read_metadata worker-network-endpoints | cut -d, -f1 | cut -d: -f3)',
            f"mkdir -p {MOUNT}",
            "command -v gcsfuse >/dev/null || { apt-get update -q && apt-get install -qy gcsfuse; }",
            f"mountpoint -q {MOUNT} || gcsfuse -o allow_other {FUSE_OPTIONS} {shell(place.name)} {MOUNT} || exit 1",
            "BROKEN=0",
            "while :; do",
            "  docker rm -f axl >/dev/null 2>&1",
            "  " + " ".join(run) + " &",
            # The machine is about to be taken away: the process saves, within the time that is left.
            "  CHILD=$!; trap 'docker stop -t 25 axl; exit 143' TERM; wait $CHILD; STATUS=$?",
            '  [ "$STATUS" = 0 ] || [ "$STATUS" = 2 ] && break',
            # 125 to 127 are docker's own: there is no such image, or it has no bash.
            "  case $STATUS in 12[567]) BROKEN=$((BROKEN + 1)) ;; *) BROKEN=0 ;; esac",
            f'  [ "$BROKEN" -lt {_BROKEN} ] || {{ echo "axl: no container starts from the image ($STATUS)"; break; }}',
            '  echo "axl: ended with status $STATUS; again in 10 s"; sleep 10',
            "done",
            f'[ "$INDEX$SLICE" != 00 ] || {shell(*delete)}',
            "",
        ]
    )
