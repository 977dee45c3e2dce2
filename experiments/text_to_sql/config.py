"""Text to SQL on two CPU cores: a small policy reads the names of a schema, writes a query, or abstains.

A wrong answer costs 0.3 of what a right one gains, so an answer pays from a chance of a quarter on, and below it the
policy learns to abstain (CELEC and EHRSQL-2024 score so: RS(0), the share of right answers, and RS(10), from which ten
times the wrong ones are taken). At a cost of 1 it abstains more: RS(10) rises further, and RS(0) may fall.
"""

from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.training.trainer import Trainer
from experiments.registry import experiment
from experiments.tasks.small import small_learner, small_rl, small_sft
from experiments.text_to_sql.questions import ABSTAIN, SqlQuestions
from experiments.text_to_sql.schemas import NUMBERS, TABLES, TEXTS
from experiments.text_to_sql.verifier import SqlVerifier
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.rollout.engine import RolloutEngine
from rl.tasks.mixture import TaskMixture
from rl.tasks.supervised import SupervisedSource

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
    source = SupervisedSource.Config(mixture=questions(seed), tokenizer=tokenizer)
    return small_sft(source, vocab_size=tokenizer.vocab_size, seq_len=128, batch_size=24, steps=steps, seed=seed)


@experiment
def text_to_sql(*, seed: int = 0, steps: int = 160) -> RLExperiment.Config:
    """A 0.4 M-parameter decoder learns by execution to answer questions in SQL, and to abstain where it would err."""
    tasks, tokenizer = questions(seed), PhraseTokenizer.Config(phrases=PHRASES, vocab_size=384)
    return small_rl(
        *(text_to_sql_sft(seed=seed), tokenizer, tasks, SqlVerifier.Config(mixture=tasks, penalty=0.3)),
        max_prompt_tokens=40,
        max_new_tokens=24,
        num_steps=steps,
        samples_per_prompt=16,
        learner=small_learner(2e-4, 5e-5, warmup=10, steps=steps),
        engine=RolloutEngine.Config(max_num_seqs=128, keep_completions=False),
        evaluation=Evaluation.Config(problems_per_family=192),
    )
