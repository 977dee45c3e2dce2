"""The runs of the learning benchmark: one change each from GRPO on the demo's tasks, all from one supervised start."""

from collections.abc import Callable
from pathlib import Path

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.learner import AdamW, Constant, Learner, WarmupLinear
from axlearn_like.training.alignment.reference import FrozenCopy
from axlearn_like.training.alignment.teacher import Teacher
from axlearn_like.training.trainer import Trainer
from experiments.reasoning_gym import demo, demo_sft, demo_teacher
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.objective import Objective, TruncatedImportance
from rl.objective.presets import cispo, dapo, distillation, grpo, gspo, maxrl, ppo, rejection_sampling, rloo
from rl.training.critic import Critic
from rl.training.packing import Packing
from rl.training.updates import Updates
from rl.verification.inline import InlineVerifier

Change = Callable[[RLExperiment.Config], object]

START, TEACHER = "start", "teacher"  # folders of the supervised runs
GROUPS, SAMPLES = 12, 8
PEAK_LR = 5e-4
_MINIBATCHES = 2  # of the runs by objective: the second one's ratio is not 1, so that clips and weights act


def supervised_start(steps: int | None = None) -> Trainer.Config:
    """The demo's supervised policy: every run begins with its parameters. `steps`: fewer, for a quick look."""
    return demo_sft(seed=0) if steps is None else demo_sft(seed=0, steps=max(steps, 51)).set(num_steps=steps)


def teacher(steps: int = 500) -> Trainer.Config:
    """The larger supervised policy that teaches in `distillation`."""
    cfg = demo_teacher(seed=0, steps=max(steps, 51))
    return cfg.set(num_steps=steps)


def learning_job(name: str, *, seed: int, steps: int, folder: Path, quick: bool = False) -> RLExperiment.Config:
    """Return the config of a run.

    Args:
        name: of `RUNS`.
        seed: of problems, sampling and mini-batches.
        steps: batches, each of one version.
        folder: of the benchmark, with the supervised runs.
        quick: an evaluation of two problems a family.
    """
    cfg = demo(seed=seed, steps=max(steps, 21))
    scorer = cfg.verifier.scorer
    cfg.set(
        num_steps=steps,
        groups=GROUPS,
        samples=SAMPLES,
        groups_per_lease=GROUPS,
        staleness=0,
        warm_start=None,
        start_from=StartFrom.Config(path=str(folder / START)),
        objective=grpo(),
        verifier=InlineVerifier.Config(scorer=scorer),
        evaluation=Evaluation.Config(problems_per_family=2 if quick else 32),
    )
    cfg.trainer.set(checkpoint=Checkpointer.Config(save_every=20, keep=1), logprob_diff_every=20)
    if name == "distillation":
        source = StartFrom.Config(path=str(folder / TEACHER))
        cfg.trainer.reference = Teacher.Config(model=teacher().model, start_from=source)
    RUNS[name](cfg)
    updates = 1 if cfg.trainer.updates is None else cfg.trainer.updates.count
    total = max(steps * updates, 2)
    schedule = WarmupLinear.Config(
        peak_lr=PEAK_LR, warmup_steps=min(5 * updates, total - 1), total_steps=total, end_lr=PEAK_LR / 5
    )
    return cfg.set(learner=Learner.Config(optimizer=AdamW.Config(b2=0.98), schedule=schedule, clip_norm=0.5))


def _objective(objective: Callable[[], Objective.Config], *, oversample: float = 1.0) -> Change:
    """An algorithm as published, by mini-batches on fresh rollouts."""

    def change(cfg: RLExperiment.Config) -> None:
        cfg.objective = objective()
        cfg.trainer.updates = Updates.Config(minibatches=_MINIBATCHES)
        cfg.controller.oversample = oversample

    return change


def _critic() -> Objective.Config:
    learner = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-3), clip_norm=1.0)
    return ppo(Critic.Config(learner=learner), lam=1.0)


def _stale(versions: int, *, corrected: bool = False) -> Change:
    """GRPO by one update a batch, on rollouts that are so many versions old."""

    def change(cfg: RLExperiment.Config) -> None:
        cfg.staleness = versions
        cfg.parameter_server.keep = versions + 2
        if corrected:
            cfg.objective.importance = TruncatedImportance.Config(cap=2.0)

    return change


def _epochs(cfg: RLExperiment.Config) -> None:
    cfg.trainer.updates = Updates.Config(minibatches=_MINIBATCHES, epochs=4)


def _kl(cfg: RLExperiment.Config) -> None:
    _objective(lambda: grpo(kl_coef=0.04))(cfg)
    cfg.trainer.reference = FrozenCopy.Config()


def _microbatches(cfg: RLExperiment.Config) -> None:
    cfg.trainer.set(row_multiple=GROUPS, microbatches=GROUPS // 2)


def _packed(cfg: RLExperiment.Config) -> None:
    cfg.trainer.packing = Packing.Config(rows=4)


# Sections of the result: the runs that each compares.
SECTIONS: dict[str, tuple[str, ...]] = {
    "objectives": ("ppo", "grpo", "dapo", "gspo", "cispo", "rloo", "maxrl", "distillation"),
    "staleness": ("stale0", "stale1", "stale4", "stale8", "stale1_tis", "stale4_tis", "stale8_tis"),
    "rejection": ("grpo", "maxrl", "rejection"),
    "epochs": ("stale0", "grpo", "epochs4"),
    "kl": ("grpo", "kl"),
    "split": ("stale0", "microbatches", "packed"),
}

RUNS: dict[str, Change] = {
    "ppo": _objective(_critic),
    "grpo": _objective(grpo),
    "dapo": _objective(dapo, oversample=2.0),
    "gspo": _objective(gspo),
    "cispo": _objective(cispo),
    "rloo": _objective(rloo),
    "maxrl": _objective(maxrl),
    "distillation": _objective(distillation),
    "rejection": _objective(rejection_sampling),
    "stale0": _stale(0),
    "stale1": _stale(1),
    "stale4": _stale(4),
    "stale8": _stale(8),
    "stale1_tis": _stale(1, corrected=True),
    "stale4_tis": _stale(4, corrected=True),
    "stale8_tis": _stale(8, corrected=True),
    "epochs4": _epochs,
    "kl": _kl,
    "microbatches": _microbatches,
    "packed": _packed,
}
