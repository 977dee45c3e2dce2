"""A benchmark worker for our own stack: the experiment `grpo_bench`, all roles in this process."""

from mesh.imports import many_imports
from rl.training.spec import TrainerServices

with many_imports():  # same as in `axl rl`
    import jax

    from axlearn_like.config import to_text
    from axlearn_like.run.directory import RunDirectory
    from axlearn_like.run.metrics import read_rows
    from experiments.grpo_bench import grpo_bench
    from mesh import make_mesh
    from mesh.devices import keep_step_memory
    from rl.experiment import RLExperiment
    from rl.parameter_server.client import connect_local
    from tools.bench.grpo_step.job import GrpoJob
    from tools.bench.harness.circumstances import system_version
    from tools.bench.harness.protocol import StepServer


def experiment_config(job: GrpoJob) -> RLExperiment.Config:
    """Return the job as one of our experiments."""
    names = ("prompts", "group", "prompt_tokens", "new_tokens", "layers", "dim", "ffn", "heads", "kv_heads", "head_dim",
             "vocab", "learning_rate", "rope_theta")  # fmt: skip
    return grpo_bench(**{name: getattr(job, name) for name in names}).set(seed=job.seed)


def main() -> None:
    """Run steps on request until the runner ends the worker."""
    keep_step_memory()  # same as in `axl rl`
    cfg = experiment_config(GrpoJob())
    experiment = cfg.build()
    run = RunDirectory.open("run", to_text(cfg))
    controller, weights = experiment.make_controller(run), connect_local(experiment.make_parameter_server())
    trainer = experiment.make_trainer(run, TrainerServices(controller, weights))
    worker = experiment.make_worker("worker-0", run, controller, weights, experiment.make_verifier())
    trainer.start()
    server = StepServer(system_version(), sum(leaf.size for leaf in jax.tree.leaves(trainer.state["params"])))
    mesh = make_mesh()

    def step(index: int) -> None:
        with server.generation(), jax.set_mesh(mesh):
            worker.run_once()
        trainer.run_once()
        trainer.settle()
        row = read_rows(run.metrics_path)[index]
        server.record(int(row["gen_tokens"]), row.get("reward", 0.0))

    server.serve(step)


if __name__ == "__main__":
    main()
