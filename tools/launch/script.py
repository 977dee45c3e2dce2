"""Script of a container: unpack the code, install what it needs, start a process of the run."""

import shlex
from collections.abc import Sequence
from pathlib import PurePath, PurePosixPath

from tools.launch.command import with_files_in
from tools.launch.launch import Launch
from tools.launch.names import pod_name
from tools.launch.plan import LaunchPlan, Role

CODE = "/opt/axl"
MEETING_PORT = 8490  # where the processes of a trainer meet
USER_FILES = "user"  # folder of the bundle with files of the user's own
EXECUTABLES = "launch/executables"  # and with programs that were compiled ahead


def run_dir(cfg: Launch.Config, plan: LaunchPlan) -> PurePosixPath:
    """Return the run directory, as all processes see it."""
    return cfg.place().path / plan.name


def bundle_path(cfg: Launch.Config, digest: str) -> PurePosixPath:
    """Return the path of the code, as all processes see it."""
    return cfg.place().path / "bundles" / f"axl-{digest}.tar.gz"


def bootstrap(cfg: Launch.Config, archive: PurePath) -> str:
    """Return the script that comes before a process; its own arguments are those of `tools.launch.process`."""
    lines = ["set -euo pipefail", "ulimit -l unlimited 2>/dev/null || true  # libtpu locks memory"]
    if cfg.bundle:
        lines += [f"mkdir -p {CODE}", f"tar -xzf {archive} -C {CODE}", f"cd {CODE}"]
    if cfg.setup and cfg.on != "local":  # there the environment of the command is the image
        lines += [f"{{ {cfg.setup}; }} || exit 70  # exit status 2 would blame the experiment"]
    return "\n".join([*lines, 'exec python -m tools.launch.process "$@"']) + "\n"


def process_arguments(cfg: Launch.Config, plan: LaunchPlan, role: Role, jobset: str, *, added: bool) -> list[str]:
    """Return the arguments of `tools.launch.process` in the Pods of a JobSet; `added`: of a worker beside the fleet."""
    directory = run_dir(cfg, plan)
    mode = "command" if plan.words else "train"
    if plan.command == "rl":
        mode = "head" if role.name == "head" else "added" if added else "node"
    found = [mode, "--name", jobset, "--run-dir", str(directory)]
    if role.slices is not None:
        found += ["--hosts", str(role.pods), "--slices", str(role.jobs), "--chips", str(role.slices.host_chips)]
    if mode == "train" and role.jobs * role.pods > 1:
        found += ["--meet", f"{address(cfg, jobset)}:{MEETING_PORT}"]
    if mode == "head":
        nodes = sum(one.count * one.jobs * one.pods for one in plan.roles)
        found += ["--port", str(cfg.port), "--nodes", str(nodes)]
    if mode in ("node", "added"):
        found += ["--head", f"{head_address(cfg, plan)}:{cfg.port}"]
        found += ["--role", "added" if added else role.name]
    if mode == "node":
        return found
    if mode == "command":
        found += ["--folder", str(cfg.place().path)]
    worker = ["python", "-m", "axlearn_like", "worker", str(directory), "--name", jobset.removeprefix(f"{plan.name}-")]
    return [*found, "--", *(worker if mode == "added" else axl_command(cfg, plan))]


def axl_command(cfg: Launch.Config, plan: LaunchPlan) -> list[str]:
    """Return the command that runs, as a user would type it."""
    found = ["python", "-m", "axlearn_like"]
    if cfg.experiment is None:
        own = f"{CODE}/{USER_FILES}"
        return [*found, *(with_files_in(own, word) if cfg.bundle else word for word in plan.words)]
    found += [plan.command, bundled(cfg.experiment)]
    found += ["--run-dir", str(run_dir(cfg, plan))]
    found += [] if cfg.seed is None else ["--seed", str(cfg.seed)]
    for modifier in cfg.applied:
        found += ["--apply", bundled(modifier)]
    for edit in plan.sets:
        found += ["--set", edit]
    if plan.fleet is not None:
        found += ["--runtime", "ray", "--fleet", plan.fleet]
    return found


def bundled(name: str) -> str:
    """Return `file.py:function` as the bundle has it; other names stay."""
    place, colon, function = name.rpartition(":")
    return f"{CODE}/{USER_FILES}/{PurePosixPath(place).name}{colon}{function}" if place.endswith(".py") else name


def address(cfg: Launch.Config, jobset: str) -> str:
    """Return the name of a JobSet's first Pod in the cluster, which stays the same over restarts."""
    return f"{pod_name(jobset, 0, 0)}.{jobset}.{cfg.kubernetes.namespace}.svc"


def head_address(cfg: Launch.Config, plan: LaunchPlan) -> str:
    """Return the name of the head of an RL run in the cluster."""
    if cfg.kubernetes.one_jobset:
        return f"{plan.name}-head-0-0.{plan.name}.{cfg.kubernetes.namespace}.svc"
    return address(cfg, f"{plan.name}-head")


def words(command: Sequence[str]) -> str:
    """Return a command as a shell takes it."""
    return shlex.join(command)
