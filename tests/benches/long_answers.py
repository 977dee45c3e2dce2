"""A policy whose decoding on a CPU is bound by reading its weights, and whose answers are long: sums, counted."""

import random
from collections.abc import Iterator

from axlearn_like.config import config_function
from axlearn_like.input.shuffle import derived_seed
from axlearn_like.learner import WarmupLinear
from axlearn_like.tokenizers.bytes import ByteTokenizer
from experiments.tasks.small import small_learner, small_rl, small_sft
from models.tiny import tiny
from rl.experiment import RLExperiment
from rl.rollout.engine import RolloutEngine
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows
from rl.tasks.supervised import SupervisedSource
from rl.verification.verifiers.text import ExactMatch


@config_function
def sum_rows(count: int) -> Iterator[dict[str, str]]:
    """Yield rows: the prompt is a sum, the answer counts one term up and the other down until nothing is left."""
    for number in range(count):
        draw = random.Random(derived_seed("counted", number))
        first, second = draw.randrange(10, 75), draw.randrange(5, 25)
        lines = [f"{first + step}+{second - step:02}=" for step in range(second + 1)]
        yield {"prompt": f"{first}+{second:02}", "answer": "".join(lines) + str(first + second)}


def counted_sums(*, steps: int = 90) -> RLExperiment.Config:
    """Supervision and GRPO of a 7 M-parameter decoder on answers of 35 to 155 bytes, four samples of each prompt."""
    rows = RowFunction.Config(function=sum_rows, arguments={"count": 1500})
    tasks = TaskMixture.Config(families=(TaskRows.Config(rows=rows, label="counted sums"),), heldout_every=16)
    tokenizer = ByteTokenizer.Config()
    source = SupervisedSource.Config(mixture=tasks, tokenizer=tokenizer, num_examples=1)
    sizes = {"vocab_size": tokenizer.vocab_size, "seq_len": 288, "batch_size": 8}
    supervised = small_sft(source, **sizes, steps=steps, seed=0)
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
    supervised.model = tiny(vocab_size=tokenizer.vocab_size, dim=384, hidden=1024, **heads)
    supervised.learner.schedule = WarmupLinear.Config(peak_lr=1e-3, warmup_steps=20, total_steps=120, end_lr=3e-4)
    return small_rl(
        *(supervised, tokenizer, tasks, ExactMatch.Config(mixture=tasks)),
        max_prompt_tokens=8,
        max_new_tokens=160,
        num_steps=40,
        samples_per_prompt=4,
        learner=small_learner(2e-5, 1e-5, warmup=5, steps=40),
        engine=RolloutEngine.Config(max_num_seqs=64, keep_completions=False),
        evaluation=None,
    )
