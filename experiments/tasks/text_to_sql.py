"""Text to SQL on two CPU cores: a small policy reads the names of a schema, writes a query, or abstains.

A wrong answer costs as much as a right one gains, so the policy learns to abstain where it does not know (CELEC and
EHRSQL-2024 score so: RS(0), the share of right answers, and RS(10), from which ten times the wrong ones are taken).
"""

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.input import FirstFit, SupervisedInput
from axlearn_like.learner import AdamW, Learner, WarmupLinear
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.trainer import Trainer
from experiments.registry import experiment
from models.tiny import tiny
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.objective import TruncatedImportance
from rl.objective.presets import grpo
from rl.rollout.engine import RolloutEngine
from rl.tasks.mixture import TaskMixture
from rl.tasks.sql.questions import ABSTAIN, SqlQuestions
from rl.tasks.sql.schemas import NUMBERS, TABLES, TEXTS
from rl.tasks.supervised import SupervisedSource
from rl.training.trainer import PolicyTrainer
from rl.verification.service import Verifier
from rl.verification.verifiers.sql import SqlVerifier

SUPERVISED_START = 1_000_000  # training problems by index, beyond those of RL
VALIDATION_START = 2_000_000
_NAMES = sorted({name for names in (*TABLES.values(), *NUMBERS.values(), *TEXTS.values()) for name in names} | {*TEXTS})
# One token each: what schemas are made of, and the words of questions and queries. Digits stay bytes.
PHRASES = (
    *_NAMES,
    *(
        "(",
        ", ",
        ")\n",
        "How many ",
        "The ",
        "highest ",
        "lowest ",
        "mean ",
        " of ",
        " with ",
        " by ",
        " over ",
        " under ",
    ),
    *("?", "north", "south", "east", "west", ABSTAIN),
    *("SELECT ", "COUNT(*)", "MAX(", "MIN(", "AVG(", ")", " FROM ", " WHERE ", " > ", " < ", " = '", "'", " GROUP BY "),
)


def questions(seed: int) -> TaskMixture.Config:
    """Questions about two tables; a quarter of the schemas is held out."""
    return TaskMixture.Config(families=(SqlQuestions.Config(),), seed=seed, heldout_every=4)


@experiment
def text_to_sql_sft(*, seed: int = 0, steps: int = 500) -> Trainer.Config:
    """Supervised fine-tuning on questions with their queries."""
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES, vocab_size=384)
    source = SupervisedSource.Config(
        mixture=questions(seed), tokenizer=tokenizer, num_examples=1_000_000, start=SUPERVISED_START
    )
    rows = SupervisedInput.Config(
        source=source, seq_len=128, batch_size=24, rows=FirstFit.Config(window=256), seed=seed
    )
    unseen = rows.clone(source=source.clone(start=VALIDATION_START, num_examples=1_000))
    policy = tiny(vocab_size=tokenizer.vocab_size, dim=96, num_heads=3, num_kv_heads=1, hidden=256)
    return Trainer.Config(
        model=policy,
        input=rows,
        learner=Learner.Config(
            optimizer=AdamW.Config(b2=0.98, weight_decay=0.1),
            schedule=WarmupLinear.Config(peak_lr=3e-3, warmup_steps=50, total_steps=steps, end_lr=2.5e-3),
        ),
        checkpoint=Checkpointer.Config(save_every=100, keep=1),
        mesh={"data": -1},
        num_steps=steps,
        evaluators=(LossEvaluator.Config(input=unseen),),
        seed=seed,
    )


@experiment
def text_to_sql(*, seed: int = 0, steps: int = 160) -> RLExperiment.Config:
    """A 0.4 M-parameter decoder learns by execution to answer questions in SQL, and to abstain where it would err."""
    tasks, supervised = questions(seed), text_to_sql_sft(seed=seed)
    return RLExperiment.Config(
        policy=supervised.model,
        tokenizer=PhraseTokenizer.Config(phrases=PHRASES, vocab_size=384),
        tasks=tasks,
        max_prompt=40,
        max_new=24,
        num_steps=steps,
        groups=16,
        samples=16,
        groups_per_lease=8,
        staleness=1,
        seed=seed,
        warm_start=supervised,
        objective=grpo().set(
            old_policy="current",
            importance=TruncatedImportance.Config(cap=2.0),  # rollouts are one update old
            zero_variance="drop",
        ),
        learner=Learner.Config(
            optimizer=AdamW.Config(b2=0.98),
            schedule=WarmupLinear.Config(peak_lr=2e-4, warmup_steps=10, total_steps=steps, end_lr=5e-5),
            clip_norm=0.5,
        ),
        trainer=PolicyTrainer.Config(row_multiple=4),
        engine=RolloutEngine.Config(max_num_seqs=128, keep_completions=False),
        verifier=Verifier.Config(scorer=SqlVerifier.Config(mixture=tasks, penalty=1.0), processes=1),
        evaluation=Evaluation.Config(problems_per_family=192),
    )
