"""Golden texts of what `axl launch` writes, compared by tests/tools/launch/test_golden.py.

    python -m tests.golden.launch.manifests

The digest of the code is left out, and so are the experiments' configs, which have golden texts of their own.
"""

import json
from pathlib import Path
from typing import Any

from axlearn_like.config import to_text
from tools.launch.launch import Kubernetes, Launch, Slurm, TpuApi
from tools.launch.plan import LaunchPlan, plan_launch
from tools.launch.submission import render

DIRECTORY = Path(__file__).parents[2] / "tools" / "launch" / "golden"
DIGEST = "0" * 16
CASES: dict[str, Launch.Config] = {
    "llama2_7b.gke": Launch.Config(
        experiment="llama2_7b",
        devices="v5p:4x4x4",
        slices=2,
        capacity="reserved:mine",
        price=4.2,
        storage="gs://bucket/runs",
        kubernetes=Kubernetes.Config(queue="research", priority="high"),
    ),
    "qwen25_0_5b_rl.gke": Launch.Config(
        experiment="qwen25_0_5b_rl",
        seed=3,
        sets=("num_steps=100",),
        devices="v6e:2x2",
        workers=2,
        worker_devices="v6e:1x1",
        worker_capacity="spot",
        secret_env={"WANDB_API_KEY": "wandb/key"},
        kubernetes=Kubernetes.Config(worker_priority="low"),
    ),
}
CASES["llama2_7b.queued"] = Launch.Config(
    experiment="llama2_7b",
    on="queued-resource",
    devices="v5p:4x4x4",
    slices=2,
    capacity="spot",
    storage="gs://bucket/runs",
    tpu_api=TpuApi.Config(project="mine", zone="us-east5-a", wait_hours=12.0),
)
CASES["eval.gke"] = Launch.Config(
    command=("eval", "qwen25-0-5b-rl", "--tasks", "gsm8k=data/gsm8k.jsonl", "--samples", "8"),
    devices="v6e:2x2",
    capacity="spot",
    storage="gs://bucket/runs",
)
CASES["convert.gke"] = Launch.Config(
    command=("convert", "import", "hf/qwen", "models/qwen"), storage="gs://bucket/runs"
)
CASES["bench.queued"] = CASES["llama2_7b.queued"].clone(
    experiment=None, command=("bench", "rollout", "--json"), devices="v6e:2x2", slices=1
)
CASES["qwen25_0_5b_rl_reference.gke"] = CASES["qwen25_0_5b_rl.gke"].clone(
    sets=(
        "trainer.reference=axlearn_like.training.alignment.reference:FrozenCopy",
        "objective.regulariser=rl.objective.regulariser:ReferenceKL",
        "objective.regulariser.coef=0.1",
    ),
    reference_devices="v6e:4x4",
    price=2.0,
    worker_price=0.5,
    reference_price=0.75,
)
CASES["llama2_7b_h100.gke"] = CASES["llama2_7b.gke"].clone(devices="h100-mega:16", slices=1, capacity="spot")
CASES["qwen25_0_5b_rl_h200.gke"] = CASES["qwen25_0_5b_rl.gke"].clone(
    devices="h200:8", slices=2, worker_devices="h100:1", sets=("num_steps=100", "trainer.mesh={'data': 16}")
)
CASES["llama2_7b_h100.slurm"] = Launch.Config(
    experiment="llama2_7b",
    on="slurm",
    devices="h100:16",
    storage="dir:/shared/runs",
    setup=". /shared/venv/bin/activate",
    slurm=Slurm.Config(partition="gpu", time="24:00:00", options=("--qos=high",)),
)
CASES["qwen25_0_5b_rl.slurm"] = CASES["qwen25_0_5b_rl.gke"].clone(
    on="slurm",
    devices="h100:4",
    worker_devices="h100:1",
    worker_capacity=None,
    secret_env={},
    storage="dir:/shared/runs",
)


def golden_text(cfg: Launch.Config, plan: LaunchPlan) -> str:
    """Return config, plan and files as one text."""
    data: dict[str, Any] = {key: value for key, value in plan.as_dict().items() if key != "plan_s"}
    parts = {"launch.txt": to_text(cfg), "plan.json": json.dumps(data, indent=1) + "\n", **render(cfg, plan, DIGEST)}
    return "".join(f"==> {name} <==\n{text}" for name, text in parts.items())


def main() -> None:
    """Write the texts, and delete those of cases that are gone."""
    DIRECTORY.mkdir(exist_ok=True)
    for path in DIRECTORY.glob("*.txt"):
        if path.stem not in CASES:
            path.unlink()
    for name, cfg in CASES.items():
        (DIRECTORY / f"{name}.txt").write_text(golden_text(cfg, plan_launch(cfg.clone())))


if __name__ == "__main__":
    main()
