"""Script of a container: unpack the code, install what it needs, start a process of the run."""

from pathlib import PurePosixPath

from tools.launch.command import with_files_in
from tools.launch.kubernetes.names import pod_name
from tools.launch.launch import Launch
from tools.launch.plan import LaunchPlan, Role

CODE = "/opt/axl"
MEETING_PORT = 8490  # rendezvous of a trainer's processes
USER_FILES = "user"  # folder of the bundle with files of the user's own

# It has no text of a user's: they are its arguments, folder of the code, archive, setup, and those of
# `tools.launch.process`, which begin with MODE --name NAME --run-dir DIR. What fails the same way three times, each
# within a minute of its start, ends with status 2, which nothing starts again; all else that fails, with 70.
BOOTSTRAP = """\
set -uo pipefail
ulimit -l unlimited 2>/dev/null || true  # libtpu locks memory
code=$1 archive=$2 setup=$3; shift 3
prepare() {
  [ -z "$code" ] || { mkdir -p "$code" && tar -xzf "$archive" -C "$code" && cd "$code"; } || return
  [ -z "${AXL_NCCL:-}" ] || { set +u; . "$AXL_NCCL" && set -u; } || return  # of the platform
  eval "$setup"
}
log="$5/launch/logs/$3-${AXL_SLICE:-0}-${JOB_COMPLETION_INDEX:-0}.setup.log"
mkdir -p "${log%/*}" || exit 70
exec 3>&1 4>&2 > >(tee "$log") 2>&1
prepare; status=$?
exec >&3 2>&4 3>&- 4>&-
failed="${log%.log}.failed"
if [ "$status" = 0 ]; then rm -f "$failed"; exec python -m tools.launch.process "$@"; fi
sleep 1  # until tee has written all
now="$(tail -n 3 "$log")"$'\n'"status $status"
before=$(cat "$failed" 2>/dev/null) times=1
if [ "$SECONDS" -lt 60 ] && [ "${before#?$'\n'}" = "$now" ]; then
  case $before in 1*) times=2 ;; 2*) times=3 ;; esac
fi
if [ "$times" = 3 ]; then
  rm -f "$failed"
  echo "axl: to unpack and install the code failed 3 times in the same way (status $status); it is not tried again" >&2
  exit 2
fi
printf '%s\n%s' "$times" "$now" > "$failed"
[ -z "$setup" ] || sleep 10  # a network that is away for a moment
exit 70
"""

# Whole, or not there: another run with the same code may unpack it at the same time, on a machine with the same pids.
UNPACK = """\
unpack() { part=$(mktemp -d "$1.XXXXXX") && tar -xzf "$2" -C "$part" && chmod 755 "$part" && mv -T "$part" "$1"; }
[ -d "$1" ] || unpack "$@" || [ -d "$1" ] || exit 70
shift 2; exec "$@"
"""


def run_dir(cfg: Launch.Config, plan: LaunchPlan) -> PurePosixPath:
    """Return the run directory, as all processes see it."""
    return cfg.place().path / plan.name


def code_folder(cfg: Launch.Config, digest: str) -> PurePosixPath:
    """Return the folder of the storage in which `UNPACK` puts the code of several machines."""
    archive = bundle_path(cfg, digest)
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def bundle_path(cfg: Launch.Config, digest: str) -> PurePosixPath:
    """Return the path of the code, as all processes see it."""
    return cfg.place().path / "bundles" / f"axl-{digest}.tar.gz"


def bootstrap(cfg: Launch.Config, role: Role, digest: str) -> list[str]:
    """Return the command before the arguments of `tools.launch.process`: it unpacks the code and installs the rest."""
    code = [CODE, str(bundle_path(cfg, digest))] if cfg.bundle else ["", ""]
    extras = "rl" if role.slices is None else "rl,cuda" if role.slices.gpus else "rl,tpu"
    setup = f'pip install --quiet -c constraints.txt -e ".[{extras}]"' if cfg.setup is None else cfg.setup
    # Local runs use the command's environment as the image.
    return ["/bin/bash", "-c", BOOTSTRAP, "axl", *code, "" if cfg.on == "local" else setup]


def plain_environment(cfg: Launch.Config, plan: LaunchPlan, role: Role, code: str = CODE) -> dict[str, str]:
    """Return the variables of a process that are no secrets; `code`: the folder of the bundle."""
    found = {"PYTHONUNBUFFERED": "1", "AXL_COMPILATION_CACHE": str(cfg.place().path / "compilation-cache")}
    if plan.words and role.slices is None:
        found["JAX_PLATFORMS"] = "cpu"
    if cfg.bundle:
        found["PYTHONPATH"] = code
    if plan.command == "rl":
        found["RAY_AUTH_MODE"] = "token"
    return {**found, **cfg.env}


def process_arguments(
    cfg: Launch.Config, plan: LaunchPlan, role: Role, jobset: str, *, added: bool, code: str = CODE
) -> list[str]:
    """Return the arguments of `tools.launch.process` in the Pods of a JobSet; `added`: of a worker beside the fleet.

    Under Slurm the processes meet where the script says (AXL_MEET), and the head writes where it is.
    """
    directory = run_dir(cfg, plan)
    mode = "command" if plan.words else "train"
    if plan.command == "rl":
        mode = "head" if role.name == "head" else "added" if added else "node"
    found = [mode, "--name", jobset, "--run-dir", str(directory)]
    hosts, slices = (role.jobs * role.pods, 1) if cfg.on == "slurm" else (role.pods, role.jobs)
    if role.slices is not None:
        found += ["--hosts", str(hosts), "--slices", str(slices), "--chips", str(role.slices.host_chips)]
    if mode == "train" and role.jobs * role.pods > 1 and cfg.on != "slurm":
        found += ["--meet", f"{address(cfg, jobset)}:{MEETING_PORT}"]
    if mode == "head":
        nodes = sum(one.count * one.jobs * one.pods for one in plan.roles)
        found += ["--port", str(cfg.port), "--nodes", str(nodes)]
    if mode in ("node", "added"):
        found += [] if cfg.on == "slurm" else ["--head", f"{head_address(cfg, plan)}:{cfg.port}"]
        found += ["--role", "added" if added else role.name]
    if mode == "node":
        return found
    if mode == "command":
        found += ["--folder", str(cfg.place().path)]
    worker = ["python", "-m", "axlearn_like", "worker", str(directory), "--name", jobset.removeprefix(f"{plan.name}-")]
    return [*found, "--", *(worker if mode == "added" else axl_command(cfg, plan, code))]


def axl_command(cfg: Launch.Config, plan: LaunchPlan, code: str = CODE) -> list[str]:
    """Return the command that runs, as a user would type it; `code`: the folder of the bundle."""
    found = ["python", "-m", "axlearn_like"]
    if cfg.experiment is None:
        own = f"{code}/{USER_FILES}"
        return [*found, *(with_files_in(own, word) if cfg.bundle else word for word in plan.words)]
    found += [plan.command, bundled(cfg.experiment, code)]
    found += ["--run-dir", str(run_dir(cfg, plan))]
    found += [] if cfg.seed is None else ["--seed", str(cfg.seed)]
    for modifier in cfg.applied:
        found += ["--apply", bundled(modifier, code)]
    for edit in plan.sets:
        found += ["--set", edit]
    if plan.fleet is not None:
        found += ["--runtime", "ray", "--fleet", plan.fleet]
    return found


def bundled(name: str, code: str = CODE) -> str:
    """Return `file.py:function` as the bundle has it; other names stay."""
    place, colon, function = name.rpartition(":")
    return f"{code}/{USER_FILES}/{PurePosixPath(place).name}{colon}{function}" if place.endswith(".py") else name


def address(cfg: Launch.Config, jobset: str) -> str:
    """Return the name of a JobSet's first Pod in the cluster, which stays the same over restarts."""
    return f"{pod_name(jobset, 0, 0)}.{jobset}.{cfg.kubernetes.namespace}.svc"


def head_address(cfg: Launch.Config, plan: LaunchPlan) -> str:
    """Return the name of the head of an RL run in the cluster."""
    return address(cfg, f"{plan.name}-head")
