"""All files of a submission: its config, the experiment as resolved, manifests, the code, and how to submit them."""

from pathlib import Path

from axlearn_like.config import strip_comments, to_text
from mesh import UserError
from tools.launch.bundle import Bundle, make_bundle
from tools.launch.kubernetes.jobset import TOKEN_KEY, jobsets, token_secret
from tools.launch.launch import Launch
from tools.launch.machines.storage import MOUNT
from tools.launch.plan import LaunchPlan
from tools.launch.queued.keeper import as_text
from tools.launch.queued.request import parent, queued_resource, startup_script
from tools.launch.quoting import as_yaml, shell
from tools.launch.script import bundle_path, run_dir
from tools.launch.slurm.batch import batches, submit_script

_OWN = "launch.txt"  # a folder with this file is one of ours, and is written again
_WRITTEN = ("*.yaml", "*.json", "*.txt", "*.sh", "*.sbatch", "axl-*.tar.gz")
SUBMIT = "submit.sh"


def submission(cfg: Launch.Config, plan: LaunchPlan) -> tuple[dict[str, str], Bundle | None]:
    """Return the texts of a submission by file name, and the archive of the code.

    Raises:
        UserError: the target has no such capacity, or the code cannot be packed.
    """
    known = {_OWN: to_text(cfg)}
    if plan.experiment is not None:
        known["config.txt"] = to_text(plan.experiment)
    # Without comments: they name paths of this machine, of which the digest must not depend.
    packed = {f"launch/{name}": strip_comments(text) for name, text in known.items()}
    bundle = make_bundle(cfg, packed) if cfg.bundle else None
    return {**known, **render(cfg, plan, "" if bundle is None else bundle.digest)}, bundle


def render(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> dict[str, str]:
    """Return manifests or requests, and the script that submits them; `digest`: of the bundle."""
    if cfg.on == "queued-resource":
        return _queued(cfg, plan, digest)
    if cfg.on == "slurm":
        scripts = batches(cfg, plan, digest)
        return {**scripts, SUBMIT: submit_script(cfg, plan, digest, list(scripts))}
    found = jobsets(cfg, plan, digest).items()
    files = {f"{name}s.yaml" if name == "worker" else f"{name}.yaml": as_yaml(*all_) for name, all_ in found}
    return {**files, SUBMIT: _submit(cfg, plan, digest, sorted(files))}


def _queued(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> dict[str, str]:
    """Return the request for a queued resource, its startup script to read, and the script that submits it."""
    name, request = "queued-resource.json", queued_resource(cfg, plan, digest)
    target = f"https://tpu.googleapis.com/v2/{parent(cfg)}/queuedResources?queuedResourceId={plan.name}"
    ask = ["curl", "-sSf", "-X", "POST", "-H", "Content-Type: application/json", "--data", f"@{name}", target]
    lines = ["#!/bin/bash", f"# Submits {plan.name}; run it in its folder. The same again resumes the run."]
    lines += ["set -euo pipefail", *_upload(cfg, plan, digest)]
    # The token is read from a file that only this shell has: it is in no list of processes.
    lines.append(f'{shell(*ask)} -H @<(echo "Authorization: Bearer $(gcloud auth print-access-token)")')
    script = startup_script(cfg, plan, digest)
    return {name: as_text(request), "startup.sh": script, SUBMIT: "\n".join(lines) + "\n"}


def write(folder: Path, files: dict[str, str], bundle: Bundle | None) -> None:
    """Write a submission; files of an earlier one in the folder are removed.

    Raises:
        UserError: the folder has something else in it, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / _OWN).is_file():
            raise UserError(f"--dry-run {folder}: expected a new or empty folder, or one that `axl launch` wrote")
        for path in [path for pattern in _WRITTEN for path in folder.glob(pattern)]:
            path.unlink()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        if bundle is not None:
            (folder / bundle.file_name).write_bytes(bundle.content)
    except OSError as error:
        raise UserError(f"--dry-run {folder}: cannot write there: {error.strerror}") from error


def _submit(cfg: Launch.Config, plan: LaunchPlan, digest: str, files: list[str]) -> str:
    """Return a script of the steps that a submission by hand takes; it asks no secret of anyone."""
    lines = ["#!/bin/bash", f"# Submits {plan.name}; run it in its folder. The same again resumes the run."]
    lines += ["set -euo pipefail", *(_upload(cfg, plan, digest))]
    namespace = ["--namespace", cfg.kubernetes.namespace]
    if plan.command == "rl" and cfg.on == "gke":
        secret, get = token_secret(plan.name), ["kubectl", "get", "secret", *namespace]
        make = ["kubectl", "create", "secret", "generic", secret, *namespace]
        lines.append(f"{shell(*get, secret)} >/dev/null 2>&1 ||")
        lines.append(f'  {shell(*make)} --from-literal={TOKEN_KEY}="$(openssl rand -hex 32)"')
    lines += [shell("kubectl", "apply", "-f", name) for name in files]
    return "\n".join(lines) + "\n"


def _upload(cfg: Launch.Config, plan: LaunchPlan, digest: str) -> list[str]:
    storage, ended = cfg.place(), "launch/ended.json"
    if not storage.bucket:
        copy = f" copy axl-{digest}.tar.gz to {bundle_path(cfg, digest)}, and" if cfg.bundle else ""
        steps = f"in the claim {storage.name} (mounted at {MOUNT}):{copy} remove {run_dir(cfg, plan)}/{ended}"
        refusal = shell("echo", f"first, {steps}; then COPIED=yes bash {SUBMIT}")
        return [f'[ "${{COPIED:-}}" = yes ] || {{ {refusal} >&2; exit 1; }}']
    lines = [shell("gcloud", "storage", "rm", f"{storage.url}/{plan.name}/{ended}") + " 2>/dev/null || true"]
    if cfg.bundle:
        archive = f"axl-{digest}.tar.gz"
        lines.append(shell("gcloud", "storage", "cp", "--no-clobber", archive, f"{storage.url}/bundles/{archive}"))
    return lines
