"""Batch scripts for Slurm: a job for each instance of a role, one process a machine, queued again until the run ends.

A job is its own limit of time: Slurm sends SIGTERM so many seconds before it, and when it takes the machines away; the
processes save, and the script queues the job again, which goes on from the last checkpoint. Status 2 is the user's
mistake and ends it. Sources: slurm.schedmd.com/sbatch.html (--signal, --requeue, SLURM_RESTART_COUNT), /srun.html,
/preempt.html; the environment of the submission is that of the job, as Slurm has it by default.
"""

from collections.abc import Iterator

from tools.launch.kubernetes.jobset import jobset_name
from tools.launch.launch import Launch
from tools.launch.plan import LaunchPlan, Role
from tools.launch.quoting import shell
from tools.launch.script import UNPACK, bundle_path, code_folder, plain_environment, process_arguments, run_dir

_PORTS = "$((61000 + SLURM_JOB_ID % 4000))"  # numbers above the ephemeral ones, which differ by job
# It has no text of a user's: they are its arguments.
_RUN = """\
trap : TERM  # Slurm sends it to the processes, too
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 "$@"
status=$?
[ "$status" != 0 ] && [ "$status" != 2 ] || exit "$status"
[ "${SLURM_RESTART_COUNT:-0}" -lt "$restarts" ] ||
  { echo "axl: restarted $restarts times; it is not tried again" >&2; exit 2; }
case $(scontrol show job "$SLURM_JOB_ID") in *JobState=CANCELLED*) exit "$status" ;; esac
echo "axl: ended with status $status, and is queued again"
scontrol requeue "$SLURM_JOB_ID"
exit "$status"
"""


def batches(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> dict[str, str]:
    """Return the scripts of all instances by file name, the head's last; `digest`: of the bundle."""
    roles = [*plan.roles[1:], plan.roles[0]] if plan.command == "rl" else plan.roles
    names = [(role, index) for role in roles for index in range(role.count)]
    return {f"{jobset_name(plan, role, n)}.sbatch": batch(cfg, plan, role, n, digest) for role, n in names}


def batch(cfg: Launch.Config, plan: LaunchPlan, role: Role, index: int, digest: str) -> str:
    """Return the script of one instance of a role."""
    name, code = jobset_name(plan, role, index), str(code_folder(cfg, digest))
    lines = ["#!/bin/bash", *(f"#SBATCH {one}" for one in _options(cfg, plan, role, name)), "set -uo pipefail"]
    if cfg.bundle:
        lines.append(shell("bash", "-c", UNPACK, "axl", code, bundle_path(cfg, digest), "true") + " || exit 70")
        lines.append(f"cd {shell(code)} || exit 70")
    lines += [
        f"export {variable}={shell(value)}" for variable, value in plain_environment(cfg, plan, role, code).items()
    ]
    if plan.command == "rl":
        lines.append(f'export RAY_AUTH_TOKEN="$(cat {shell(run_dir(cfg, plan) / "launch" / "token")})" || exit 70')
    if plan.command == "train" and role.jobs * role.pods > 1:
        lines.append('first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) || exit 70')
        lines.append(f'export AXL_MEET="$first:{_PORTS}"')
    if cfg.setup:
        lines.append(f"eval {shell(cfg.setup)} || exit 70")
    arguments = process_arguments(cfg, plan, role, name, added=False, code=code)
    lines += [
        f"restarts={cfg.slurm.max_restarts}",
        f"set -- {shell('python', '-m', 'tools.launch.process', *arguments)}",
    ]
    return "\n".join(lines) + "\n" + _RUN


def _options(cfg: Launch.Config, plan: LaunchPlan, role: Role, name: str) -> Iterator[str]:
    slurm = cfg.slurm
    yield f"--job-name={name}"
    yield f"--output={run_dir(cfg, plan)}/launch/logs/{name}-%j.out"
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=TERM@{slurm.notice}"
    yield f"--nodes={role.jobs * role.pods}"
    yield "--ntasks-per-node=1"
    if role.slices is not None:
        model = "" if slurm.gpu_type is None else f"{slurm.gpu_type}:"
        yield f"--gpus-per-node={model}{role.slices.host_chips}"
    cpus = slurm.cpus
    if role.slices is None:
        cpus = cfg.kubernetes.command_cpus if plan.words else cfg.kubernetes.head_cpus
        yield f"--mem={role.memory_gib}G"
    yield "--exclusive" if cpus is None else f"--cpus-per-task={cpus}"
    for option, value in (("partition", slurm.partition), ("account", slurm.account), ("time", slurm.time)):
        if value is not None:
            yield f"--{option}={value}"
    yield from slurm.options


def submit_script(cfg: Launch.Config, plan: LaunchPlan, digest: str, files: list[str]) -> str:
    """Return the script that copies the code to the storage and submits the jobs, unless some are there."""
    folder, logs = run_dir(cfg, plan), run_dir(cfg, plan) / "launch" / "logs"
    names = ",".join(file.removesuffix(".sbatch") for file in files)
    active = shell("echo", f"{plan.name} is queued or running: squeue --me --name={names}")
    lines = [
        "#!/bin/bash",
        f"# Submits {plan.name}; run it in its folder. The same again resumes the run.",
        "set -euo pipefail",
    ]
    lines += [f'[ -z "$({shell("squeue", "--me", "--noheader", f"--name={names}")})" ] || {{ {active} >&2; exit 2; }}']
    lines += [f"(umask 077; {shell('mkdir', '-p', folder, logs)})", shell("rm", "-f", folder / "launch" / "ended.json")]
    if cfg.bundle:
        archive = bundle_path(cfg, digest)
        lines += [
            shell("mkdir", "-p", archive.parent),
            f"[ -e {shell(archive)} ] || {shell('cp', archive.name, archive)}",
        ]
    if plan.command == "rl":
        token = shell(folder / "launch" / "token")
        lines.append(f"[ -s {token} ] || (umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > {token})")
    return "\n".join([*lines, *(shell("sbatch", file) for file in files)]) + "\n"
