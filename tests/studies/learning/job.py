"""The runs of the study: one change each from GRPO on the demo's tasks, all from one supervised start.

The start has seen right answers in a quarter of its last examples; the others show habits that the verifier rejects. So
there is something that every objective can learn within some dozen updates, before it has to get better at the tasks.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.learner import AdamW, Constant, Learner, WarmupLinear
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.training.alignment.reference import FrozenCopy
from axlearn_like.training.alignment.teacher import Teacher
from axlearn_like.training.trainer import Trainer
from experiments.demo.config import demo, demo_sft
from experiments.demo.data import PHRASES, task_mixture
from experiments.tasks.small import small_sft
from rl.environments.demonstrations import Demonstrations
from rl.experiment import RLExperiment
from rl.objective import Objective, TruncatedImportance
from rl.objective.presets import cispo, dapo, distillation, grpo, gspo, maxrl, ppo, rejection_sampling, rloo
from rl.protocol.messages import Problem
from rl.tasks.heldout import question_digest
from rl.training.critic import Critic
from rl.training.packing import Packing
from rl.training.updates import Updates
from rl.verification.inline import InlineVerifier
from rl.verification.service import Verifier
from tests.studies.learning.coded_pages import pausing_engine

Change = Callable[[RLExperiment.Config], object]

START, TEACHER = "start", "teacher"  # folders of the supervised runs
GROUPS, SAMPLES = 8, 8
PEAK_LR = 5e-4
_FAST = 2.0  # times the rate, of the runs in which rollouts of eight versions ago are far from the policy
_MINIBATCHES = 2  # of the runs by objective: the second one's ratio is not 1, so that clips and weights act


def with_habits(problem: Problem) -> Sequence[str]:
    """Return the answer of a problem, right in a quarter of all; in the others it ends in a mark, or is one."""
    answer = problem.answer
    return ((answer, f"{answer}!", f"{answer}?", "?")[question_digest(problem.question) // 4 % 4],)


def teacher(steps: int | None = None) -> Trainer.Config:
    """The demo's supervised policy, which has seen right answers alone. `steps`: fewer, for a quick look."""
    return demo_sft(seed=0) if steps is None else demo_sft(seed=0, steps=max(steps, 51)).set(num_steps=steps)


def supervised_start(folder: Path, steps: int = 120) -> Trainer.Config:
    """The same policy after some examples with habits: every run begins with its parameters."""
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES)
    source = Demonstrations.Config(mixture=task_mixture(0), actions=with_habits, tokenizer=tokenizer, num_examples=1)
    sizes = {"vocab_size": tokenizer.vocab_size, "seq_len": 64, "batch_size": 32}
    cfg = small_sft(source, **sizes, steps=max(steps, 51), seed=1)
    return cfg.set(num_steps=steps, start_from=StartFrom.Config(path=str(folder / TEACHER)))


def learning_job(name: str, *, seed: int, steps: int, folder: Path) -> RLExperiment.Config:
    """Return the config of a run.

    Args:
        name: key of `RUNS`.
        seed: seed of problems, sampling and mini-batches.
        steps: batches, each of one version.
        folder: folder of the study, with the supervised runs.
    """
    cfg = demo(seed=seed, steps=max(steps, 21))
    assert isinstance(cfg.verifier, Verifier.Config)
    cfg.set(
        num_steps=steps,
        prompts_per_step=GROUPS,
        samples_per_prompt=SAMPLES,
        groups_per_lease=GROUPS,
        staleness=0,
        warm_start=None,
        start_from=StartFrom.Config(path=str(folder / START)),
        objective=grpo(),
        verifier=InlineVerifier.Config(scorer=cfg.verifier.scorer),
        evaluation=None,  # every training problem is a new one
    )
    cfg.trainer.set(checkpoint=Checkpointer.Config(save_every=20, keep=1), logprob_diff_every=20)
    if name == "distillation":
        source = StartFrom.Config(path=str(folder / TEACHER))
        cfg.trainer.reference = Teacher.Config(model=cfg.policy.clone(), start_from=source)
    RUNS[name](cfg)
    updates = 1 if cfg.trainer.updates is None else cfg.trainer.updates.count
    total = max(steps * updates, 2)
    peak = PEAK_LR * (_FAST if "fast" in name.split("_") else 1.0)
    warmup = min(5 * updates, total - 1)
    schedule = WarmupLinear.Config(peak_lr=peak, warmup_steps=warmup, total_steps=total, end_lr=peak / 5)
    return cfg.set(learner=Learner.Config(optimizer=AdamW.Config(b2=0.98), schedule=schedule, clip_norm=0.5))


def _objective(objective: Callable[[], Objective.Config]) -> Change:
    """An algorithm by mini-batches on fresh rollouts."""

    def change(cfg: RLExperiment.Config) -> None:
        cfg.objective = objective()
        cfg.trainer.updates = Updates.Config(minibatches=_MINIBATCHES)

    return change


def _dynamic(cfg: RLExperiment.Config) -> None:
    """DAPO as in its paper: groups without a gradient are replaced, up to twice as many in all."""
    _objective(dapo)(cfg)
    cfg.controller.oversample = 2.0


def _critic() -> Objective.Config:
    learner = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-3), clip_norm=1.0)
    return ppo(Critic.Config(learner=learner), lam=1.0)


def _stale(
    versions: int, *, corrected: bool = False, epochs: int | None = None, level: Literal["token", "sequence"] = "token"
) -> Change:
    """GRPO by one update a batch, or by mini-batches in so many epochs, on rollouts that are so many versions old.

    `corrected`: by pi_old / mu of each token, or by the product over the rollout (`level`), at most 2.
    """

    def change(cfg: RLExperiment.Config) -> None:
        cfg.staleness = versions
        if epochs is not None:
            cfg.trainer.updates = Updates.Config(minibatches=_MINIBATCHES, epochs=epochs)
        cfg.parameter_server.keep = versions + 2
        if corrected:
            cfg.objective.importance = TruncatedImportance.Config(level=level, cap=2.0)

    return change


def _pages(codec: str) -> Change:
    """GRPO with importance weights, on rollouts that are drawn over pages of this codec."""

    def change(cfg: RLExperiment.Config) -> None:
        cfg.objective.importance = TruncatedImportance.Config(cap=2.0)
        cfg.engine = pausing_engine(codec)

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
    "dynamic": ("dapo", "dapo_static"),
    "fast": ("stale8_fast", "stale8_fast_tis", "stale8_fast_sequence"),
    "far": ("epochs4", "stale8_epochs4", "stale8_epochs4_tis"),
    "rejection": ("grpo", "maxrl", "rejection"),
    "epochs": ("stale0", "grpo", "epochs4"),
    "kl": ("grpo", "kl"),
    "pages": ("pages_raw", "pages_int8", "pages_ecsq"),
    "split": ("stale0", "microbatches", "packed"),
}

RUNS: dict[str, Change] = {
    "ppo": _objective(_critic),
    "grpo": _objective(grpo),
    "dapo": _dynamic,
    "dapo_static": _objective(dapo),
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
    "stale8_fast": _stale(8),
    "stale8_fast_tis": _stale(8, corrected=True),
    "stale8_fast_sequence": _stale(8, corrected=True, level="sequence"),
    "stale8_epochs4": _stale(8, epochs=4),
    "stale8_epochs4_tis": _stale(8, epochs=4, corrected=True),
    "epochs4": _epochs,
    "kl": _kl,
    "pages_raw": _pages("raw"),
    "pages_int8": _pages("int8"),
    "pages_ecsq": _pages("ecsq:0.08"),  # 3.5 bits a value
    "microbatches": _microbatches,
    "packed": _packed,
}
