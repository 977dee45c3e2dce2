"""A benchmark worker for our own stack: the experiment `grpo_bench`, all roles in this process."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import jax

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from experiments.grpo_bench import grpo_bench
from mesh import make_mesh
from rl.experiment import RLExperiment
from rl.parameter_server.client import connect_local
from tools.bench.grpo.job import GrpoJob
from tools.bench.harness.protocol import StepServer


def experiment_config(job: GrpoJob) -> RLExperiment.Config:
    """Return the job as one of our experiments."""
    return grpo_bench(
        prompts=job.prompts,
        group=job.group,
        prompt_tokens=job.prompt_tokens,
        new_tokens=job.new_tokens,
        layers=job.layers,
        dim=job.dim,
        ffn=job.ffn,
        heads=job.heads,
        kv_heads=job.kv_heads,
        head_dim=job.head_dim,
        vocab=job.vocab,
        learning_rate=job.learning_rate,
    )


def build_step(job: GrpoJob) -> tuple[Callable[[StepServer, int], None], int]:
    """Build the stack for `job`.

    Returns:
        The function that runs step `index` to its end (parameters ready, inside it
        `server.generation()` around sampling and one `server.record(tokens, reward)`), and the
        number of parameters.
    """
    cfg = experiment_config(job)
    experiment = cfg.build()
    run = RunDirectory.open("run", to_text(cfg))
    controller, weights = experiment.make_controller(run), connect_local(experiment.make_parameter_server())
    trainer = experiment.make_trainer(run, controller, weights)
    worker = experiment.make_worker("worker-0", run, controller, weights, experiment.make_verifier())
    trainer.start()
    mesh = make_mesh()

    def step(server: StepServer, index: int) -> None:
        with server.generation(), jax.set_mesh(mesh):
            worker.run_once()
        trainer.run_once()
        trainer.settle()
        row = read_rows(run.metrics_path)[index]
        server.record(int(row["gen_tokens"]), row["reward"])

    return step, sum(leaf.size for leaf in jax.tree.leaves(trainer.state["params"]))


def system_version() -> str:
    """Return the name and version of the measured system."""
    try:
        return f"axlearn-like {version('axlearn-like')}"
    except PackageNotFoundError:
        return "axlearn-like (source tree)"


def main() -> None:
    """Run steps on request until the runner ends the worker."""
    step, parameters = build_step(GrpoJob())
    server = StepServer(system_version(), parameters)
    server.begin()
    index = 0
    step(server, index)
    while server.step_done():
        index += 1
        step(server, index)


if __name__ == "__main__":
    main()
