"""Qwen models at scale: pretraining of a dense one and of a mixture of experts."""

from axlearn_like.training.trainer import Trainer
from experiments.llama import DATA
from experiments.pretraining import LARGE_FSDP, pretraining, tpu_rule
from experiments.registry import experiment
from models.moe import moe
from models.qwen import qwen


@experiment
def qwen25_32b(*, rows: int = 512, length: int = 8192, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Qwen2.5 32B, 4 M tokens a step in rows of 8,192, on v5p, v6e or v5e.

    Compiled for 128 v5p chips: 6.2 GB of arguments and 57 of temporary arrays a chip, of 102.8, estimated at 24 s
    (docs/benchmarks/aot-experiments.md). Not trained here.
    """
    return pretraining(
        qwen("Qwen2.5-32B"),
        rows=rows,
        length=length,
        steps=100_000,
        peak_lr=1e-4,
        data=data,
        seed=seed,
        mesh_rules=(
            tpu_rule(r"tpu-v5p-(16|32|64)", {"fsdp": -1}, "everything", microbatches=4),
            tpu_rule(r"tpu-v5p-.*", {"data": -1, "fsdp": LARGE_FSDP}, "everything"),
            tpu_rule(r"tpu-v(6e|5e)-.*", {"fsdp": -1, "tensor": 4}, "everything"),
            (r".*", {"mesh": {"fsdp": -1}, "model.remat": "everything"}),
        ),
    )


@experiment
def qwen3_30b_a3b(*, rows: int = 1024, length: int = 4096, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Qwen3 30B-A3B (128 experts, of which a token uses 8), 4 M tokens a step, on v5p, v6e or v5e.

    Compiled for 256 v6e chips: 1.9 GB of arguments and 13.2 of temporary arrays a chip, of 33.5; estimated at 10 s, of
    which most is memory traffic with places for rows that do not come
    (docs/benchmarks/aot-experiments.md). Not trained here.
    """
    return pretraining(
        moe("Qwen3-30B-A3B"),
        rows=rows,
        length=length,
        steps=100_000,
        peak_lr=3e-4,
        data=data,
        seed=seed,
        mesh_rules=(
            tpu_rule(r"tpu-v5p-.*", {"fsdp": -1, "expert": 8}, "everything"),
            tpu_rule(r"tpu-v(6e|5e)-.*", {"fsdp": -1, "expert": 8}, "everything", microbatches=4),
            (r".*", {"mesh": {"fsdp": -1}, "model.remat": "everything"}),
        ),
    )
