"""Text to SQL on two CPU cores: a small policy reads the names of a schema, tries queries, and answers or abstains.

A wrong answer costs what a right one gains, so an answer pays from a chance of one half on, and below it the policy
learns to abstain (CELEC and EHRSQL-2024 score so: RS(0), the share of right answers, and RS(10), from which ten times
the wrong ones are taken). `once`, `with_examples` and `with_steps` are the same with another `Form`:

    axl rl experiments/text_to_sql/config.py:once
"""

import dataclasses
from typing import Any

from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.training.trainer import Trainer
from experiments.registry import experiment
from experiments.tasks.small import small_learner, small_rl, small_sft
from experiments.text_to_sql.attempts import KEPT, SqlAttempts
from experiments.text_to_sql.questions import ABSTAIN, LAST_LINE, SqlQuestions
from experiments.text_to_sql.schemas import NUMBERS, TABLES, TEXTS
from experiments.text_to_sql.shown import TRIES, attempts
from experiments.text_to_sql.verifier import SqlVerifier
from rl.environments.demonstrations import Demonstrations
from rl.environments.task import EnvironmentTask
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.objective import BatchAdvantage
from rl.rollout.engine import RolloutEngine
from rl.tasks.mixture import TaskMixture
from rl.tasks.supervised import SupervisedSource
from rl.training.packing import Packing

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
    *(KEPT, "\nno such column: ", "\nno such table: "),
    *("\n1 row: INTEGER\n", "\n1 row: REAL\n", " rows: TEXT, INTEGER\n"),
    *("SELECT ", "COUNT(*)", "MAX(", "MIN(", "AVG(", ")", " FROM ", " WHERE ", " > ", " < ", " = '", "'", " GROUP BY "),
)


@dataclasses.dataclass(frozen=True)
class Form:
    """Form in which questions are asked and answered: what an ablation changes."""

    tries: int = TRIES  # 1: without feedback
    shots: int = 0  # examples before the question
    steps: bool = False  # a line before the query says what is what in the schema


def questions(seed: int, form: Form = Form()) -> TaskMixture.Config:
    """Questions about two tables; a quarter of the schemas is held out."""
    source = SqlQuestions.Config(shots=form.shots, steps=form.steps)
    pattern = LAST_LINE if form.steps else None
    # An action without end is a query that does not run. A limit of the episode alone would leave it unscored, and 0 is
    # more than a wrong answer pays.
    limits: dict[str, Any] = {"max_turns": form.tries, "max_turn_tokens": 48 if form.steps else 16, "max_error": 32}
    environment = SqlAttempts.Config(tries=form.tries, answer_pattern=pattern, **limits)
    families = (EnvironmentTask.Config(source=source, environment=environment),)
    return TaskMixture.Config(families=families, seed=seed, heldout_every=4)


@experiment
def text_to_sql_sft(*, seed: int = 0, steps: int = 500, form: Form = Form()) -> Trainer.Config:
    """Supervised fine-tuning on questions with their queries, half of which are found by way of an error."""
    tasks, tokenizer = questions(seed, form), PhraseTokenizer.Config(phrases=PHRASES, vocab_size=384)
    source = SupervisedSource.Config() if form.tries == 1 else Demonstrations.Config(actions=attempts)
    source.set(mixture=tasks, tokenizer=tokenizer)
    size = 2 if form.shots or form.steps else 1
    sizes = {"seq_len": 128 * size, "batch_size": 24 // size, "vocab_size": tokenizer.vocab_size}
    return small_sft(source, **sizes, steps=steps, seed=seed)


@experiment
def text_to_sql(*, seed: int = 0, steps: int = 140, form: Form = Form()) -> RLExperiment.Config:
    """A 0.4 M-parameter decoder learns by execution to answer questions in SQL, and to abstain where it would err."""
    tasks, tokenizer = questions(seed, form), PhraseTokenizer.Config(phrases=PHRASES, vocab_size=384)
    scorer = SqlVerifier.Config(mixture=tasks, penalty=1.0, field="query")
    cfg = small_rl(
        *(text_to_sql_sft(seed=seed, form=form), tokenizer, tasks, scorer),
        max_prompt_tokens=40 + 48 * form.shots,
        max_new_tokens=208 if form.steps else 112,
        num_steps=steps,
        samples_per_prompt=8,
        learner=small_learner(2.3e-4, 5e-5, warmup=60, steps=steps),
        engine=RolloutEngine.Config(max_num_seqs=128, keep_completions=False, steps_per_dispatch=12),
        evaluation=Evaluation.Config(problems_per_family=576),
    )
    # Many groups differ in one answer, of which a division by their own deviation would make too much.
    cfg.objective.advantage = BatchAdvantage.Config(centre="group")
    # Episodes are short beside what they may have.
    cfg.trainer.set(packing=Packing.Config(lengths=(256,), prompts=2 * cfg.max_prompt_tokens, rows=4), row_multiple=1)
    return cfg.set(prompts_per_step=32)


def once(*, seed: int = 0, steps: int = 140) -> RLExperiment.Config:
    """Return the experiment with one try, and so without feedback."""
    return text_to_sql(seed=seed, steps=steps, form=Form(tries=1))


def with_examples(*, seed: int = 0, steps: int = 140) -> RLExperiment.Config:
    """Return the experiment with two examples before each question."""
    return text_to_sql(seed=seed, steps=steps, form=Form(shots=2))


def with_steps(*, seed: int = 0, steps: int = 140) -> RLExperiment.Config:
    """Return the experiment with a line before each query that says what is what in the schema."""
    return text_to_sql(seed=seed, steps=steps, form=Form(steps=True))
