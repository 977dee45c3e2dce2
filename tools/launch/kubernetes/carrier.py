"""Code and files of a submission on their way into the run's storage: parts in ConfigMaps, which a Job joins there.

So a user needs rights in the cluster only, none in the storage; and storage that cannot be written is found out before
anything of the run is created.
"""

import base64
from collections.abc import Iterator
from typing import Any

from tools.launch.launch import Launch
from tools.launch.machines.storage import MOUNT
from tools.launch.plan import LaunchPlan
from tools.launch.quoting import literal, shell
from tools.launch.script import bundle_path, run_dir

_PART = 700_000  # bytes; an object of a cluster has at most a megabyte
_PARTS = "/parts"
_LIMIT = 600  # seconds


def carrier_name(run: str) -> str:
    """Return the name of the Job."""
    return f"{run}-code"


def parts(run: str, archive: bytes, labels: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield ConfigMaps with the parts of an archive."""
    for number, start in enumerate(range(0, len(archive), _PART)):
        content = base64.b64encode(archive[start : start + _PART]).decode()
        yield {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{carrier_name(run)}-{number}", "labels": labels},
            "binaryData": {f"part-{number:03d}": content},
        }


def carrier(cfg: Launch.Config, plan: LaunchPlan, digest: str, count: int, labels: dict[str, str]) -> dict[str, Any]:
    """Return the Job that joins `count` parts in the run's storage, and takes away the mark of an ended run."""
    target = bundle_path(cfg, digest)
    ended = run_dir(cfg, plan) / "launch" / "ended.json"
    lines = ["set -eu", shell("mkdir", "-p", target.parent), shell("rm", "-f", ended)]
    if count:
        # Only a whole file gets the name.
        whole, part = shell(target), shell(f"{target}.part")
        lines.append(f"[ -e {whole} ] || {{ cat {_PARTS}/* > {part}; mv {part} {whole}; }}")
    sources = [{"configMap": {"name": f"{carrier_name(plan.name)}-{number}"}} for number in range(count)]
    mounts = [{"name": "runs", "mountPath": MOUNT}]
    volumes: list[dict[str, Any]] = [cfg.place().volume()]
    if count:
        mounts.append({"name": "parts", "mountPath": _PARTS})
        volumes.append({"name": "parts", "projected": {"sources": sources}})
    annotations = cfg.place().annotations()
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": carrier_name(plan.name), "labels": labels},
        "spec": {
            "backoffLimit": 1,
            "activeDeadlineSeconds": _LIMIT,
            "template": {
                "metadata": {"labels": labels, **({"annotations": annotations} if annotations else {})},
                "spec": {
                    "restartPolicy": "Never",
                    "serviceAccountName": cfg.kubernetes.service_account,
                    "automountServiceAccountToken": False,
                    "containers": [
                        {
                            "name": "code",
                            "image": cfg.image,
                            "command": ["/bin/sh", "-c", literal("\n".join(lines))],
                            "volumeMounts": mounts,
                        }
                    ],
                    "volumes": volumes,
                },
            },
        },
    }
