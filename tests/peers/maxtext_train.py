"""MaxText on the small supervised job: its own configuration and training loop, held between steps.

Run by the benchmark with the interpreter of the peer's environment (see `environments.py`).
"""

# Imports that only the peer's environment can resolve:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.protocol import StepServer
from train_job import DTYPES, QUICK, TrainJob

ENDLESS = 10**6  # steps; the runner ends the worker before


def arguments_of(job: TrainJob, dtype: str) -> list[str]:
    """Return MaxText's command line: the job, with everything off that costs time beside training."""
    settings = {
        "run_name": "train_step",
        "base_output_directory": str(Path("maxtext-out").resolve()),
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "dataset_type": "synthetic",
        "dtype": dtype,
        "steps": ENDLESS,
        "base_num_decoder_layers": job.layers,
        "base_emb_dim": job.dim,
        "base_mlp_dim": job.ffn,
        "base_num_query_heads": job.heads,
        "base_num_kv_heads": job.heads,
        "head_dim": job.head_dim,
        "vocab_size": job.vocab,
        "normalization_layer_epsilon": job.norm_eps,
        "per_device_batch_size": job.batch,
        "max_target_length": job.length,
        "attention": "dot_product",
        "remat_policy": "full",  # of each block, the default
        "learning_rate": job.learning_rate,
        "adam_b1": job.b1,
        "adam_b2": job.b2,
        "adam_eps": job.eps,
        "adam_weight_decay": job.weight_decay,
        "gradient_clipping_threshold": job.clip,
        "enable_checkpointing": False,
        "enable_tensorboard": False,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
    }
    # Its compilation cache; the runner decides by JAX's own switch whether there is one.
    settings["jax_cache_dir"] = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    package = find_spec("maxtext")
    assert package is not None and package.origin is not None
    base = Path(package.origin).parent / "configs" / "base.yml"
    return ["train", str(base), *(f"{name}={value}" for name, value in settings.items())]


def main() -> None:
    """Train one step per request until the runner ends the worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    job = QUICK if arguments.quick else TrainJob()
    server = StepServer(f"maxtext {version('maxtext')}, jax {version('jax')}", parameters=0)
    # Imported only now: these modules print on import, and the standard output belongs to the protocol.
    import jax
    from flax import nnx
    from maxtext.trainers.pre_train import train

    iteration = train.training_loop_iteration

    def held(device_state: dict[str, Any], *others: Any) -> Any:
        metrics = iteration(device_state, *others)
        jax.block_until_ready(device_state["state"])
        state = device_state["state"]
        params = state.params if hasattr(state, "params") else nnx.filter_state(state.model, nnx.Param)
        server.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        server.note(loss=float(metrics["scalar"]["learning/loss"]))
        if not server.step_done():
            raise SystemExit
        return metrics

    train.training_loop_iteration = held
    train.main(arguments_of(job, arguments.dtype))


if __name__ == "__main__":
    main()
