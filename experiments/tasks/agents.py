"""Three agents that look a number up in a long text: one finds it, one checks it, the last one answers.

axl train experiments/tasks/agents.py:lookup_sft --run-dir runs/lookup_base
axl rl experiments/tasks/agents.py:lookup_rl

A text has a number behind each of some names, all else being other words. Fine-tuning shows prompts of all roles, as
`rl/environments/agents.py` makes them; RL trains the last role, for which the base speaks as the other two.
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, override

import numpy as np

from axlearn_like.checkpoint.convert import StartFrom, WrapPlain
from axlearn_like.config import ConfigBase, Configurable, config_function
from axlearn_like.input.shuffle import derived_seed
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.tokenizers.protocol import Tokenizer
from axlearn_like.training.trainer import Trainer
from experiments.modifiers import low_rank
from experiments.tasks.small import small_learner, small_rl, small_sft
from mesh.errors import UserError
from rl.environments.agents import AgentRole, Agents, shared_order
from rl.environments.task import EnvironmentTask
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.protocol.segments import SegmentedText, TextSegment
from rl.rollout.engine import RolloutEngine
from rl.tasks.encoding import encode_segments
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows
from rl.verification.verifiers.text import ExactMatch

NAMES = tuple("".join(letters) for letters in product("bdg", "ae", "nr"))
WORDS = tuple("so we look at this and then that one as well for all of them who have been here".split())
PHRASES = (
    *(f" {name}={digit}" for name in NAMES for digit in range(10)),  # facts
    *(f"{name}?" for name in NAMES),  # questions
    *(f" {word}" for word in WORDS),
    *(f"={digit}" for digit in range(10)),  # answers
    *("finder: ", "checker: ", "\n"),
)
TOKENIZER = PhraseTokenizer.Config(phrases=PHRASES, vocab_size=448)
_INSTRUCTION = 24  # words of a role's instruction


@dataclasses.dataclass(frozen=True, slots=True)
class Lookup:
    """A problem: find the number behind a name."""

    question: str
    retrieved: str
    answer: str
    numbers: Mapping[str, int]  # numbers of all names that may be in the text


def lookup(seed: int, *, words: int, facts: float = 0.4, record: bool = False) -> Lookup:
    """Return a problem.

    Args:
        words: tokens of its text, in which each name keeps its number.
        facts: share of facts.
        record: all texts have the same words and names in the same places, and other numbers.
    """
    draw = random.Random(seed)
    place = random.Random(words) if record else draw
    names = place.sample(NAMES, min(len(NAMES), max(2, words // 8)))
    said = names + [place.choice(names if place.random() < facts else WORDS) for _ in range(words - len(names))]
    place.shuffle(said)
    numbers = {name: draw.randrange(10) for name in names}
    text = "".join(f" {one}={numbers[one]}" if one in numbers else f" {one}" for one in said)
    asked = draw.choice(names)
    return Lookup(f"{asked}?", text, f"={numbers[asked]}", numbers)


def lookup_seed(number: int) -> int:
    """Return the seed of a problem by its number."""
    return derived_seed("lookup", number)


def instruction(role: str) -> str:
    """Return the instruction of a role: words of its own."""
    draw = random.Random(role)
    return "".join(f" {draw.choice(WORDS)}" for _ in range(_INSTRUCTION))


def lookup_roles() -> tuple[AgentRole.Config, ...]:
    """Return the three roles."""
    both = "retrieved", "asked"
    sees = {"finder": both, "checker": (*both, "finder"), "editor": (*both, "finder", "checker")}
    return tuple(
        AgentRole.Config(name=name, instruction=instruction(name), sees=others, max_new_tokens=1)
        for name, others in sees.items()
    )


FORMS = {"retrieved": "{}\n", "asked": "{}\n"}  # the question again behind the text


def role_prompt(problem: Lookup, role: AgentRole.Config, order: str, said: Sequence[str] = ()) -> SegmentedText:
    """Return the prompt of a role; `order`: of `Agents.Config`; `said`: answers of peers, by default right ones."""
    peers = dict(zip(("finder", "checker"), said or (problem.answer, problem.answer), strict=False))
    texts = {"retrieved": problem.retrieved, "asked": problem.question, **peers}
    seen = role.build().segments(texts, FORMS, shared_order(lookup_roles()))
    question, own = TextSegment(f"{problem.question}\n", "question"), TextSegment(role.instruction)
    return SegmentedText([question, *seen, own] if order == "shared_first" else [own, question, *seen])


class LookupExamples(Configurable):
    """Prompts of all roles in both orders with their answers, by random access: {"tokens", "loss_mask"}.

    Behind the answer come other questions about the same text, each with its own. The loss is on all answers, those of
    peers included.
    """

    class Config(ConfigBase["LookupExamples"]):
        num_examples: int = 1000
        start: int = 0  # number of the first problem
        words: int = 48  # tokens of a text
        others: int = 4  # questions behind the answer: easier ones, from which the others are learned sooner
        tokenizer: ConfigBase = TOKENIZER

        @override
        def check_fields(self) -> None:
            self.require_least(1, "num_examples")
            self.require_least(2, "words")

    def __init__(self, cfg: Config):
        self._cfg, self._roles = cfg, lookup_roles()
        self._tokenizer: Tokenizer = cfg.tokenizer.build()
        self._answers = [self._tokenizer.encode(f"={digit}")[0] for digit in range(10)]

    def __len__(self) -> int:
        return self._cfg.num_examples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise UserError(f"example {index} of {len(self)}")
        number = self._cfg.start + index
        problem, role = lookup(lookup_seed(number), words=self._cfg.words), self._roles[number % 3]
        prompt, _ = encode_segments(
            role_prompt(problem, role, ("shared_first", "role_first")[number % 2]), self._tokenizer
        )
        others = [name for name in NAMES if f" {name}=" in problem.retrieved][: self._cfg.others]
        ends = ("", "\n\n")  # both are learned sooner than the second alone, with which prompts end
        more = "".join(f"{name}?{ends[place % 2]}={problem.numbers[name]}" for place, name in enumerate(others))
        tokens = np.asarray([*prompt, *self._tokenizer.encode(problem.answer + more)], np.int32)
        return {"tokens": tokens, "loss_mask": np.isin(tokens, self._answers)}


@config_function
def lookup_rows(words: int, count: int) -> Iterator[dict[str, str]]:
    """Yield problems as rows, with the text in a column of its own."""
    for problem in (lookup(lookup_seed(number), words=words) for number in range(count)):
        asked = {"prompt": problem.question, "asked": problem.question}
        yield {**asked, "answer": problem.answer, "retrieved": problem.retrieved}


def lookup_tasks(seed: int, words: int = 48) -> TaskMixture.Config:
    """Return the lookups as a task of three agents."""
    rows = RowFunction.Config(function=lookup_rows, arguments={"words": words, "count": 2000})
    agents = Agents.Config(roles=lookup_roles(), forms=FORMS, consults=("base",), max_turn_tokens=1)
    family = EnvironmentTask.Config(source=TaskRows.Config(rows=rows, label="lookup"), environment=agents)
    return TaskMixture.Config(families=(family,), seed=seed, heldout_every=8)


def lookup_sft(*, seed: int = 0, steps: int = 450, words: int = 48) -> Trainer.Config:
    """Supervised fine-tuning of a small decoder on prompts of all roles."""
    source = LookupExamples.Config(words=words)
    sizes = {"vocab_size": TOKENIZER.vocab_size, "seq_len": words + 64, "batch_size": 16}
    cfg = small_sft(source, **sizes, steps=steps, seed=seed)
    policy: Any = cfg.model
    policy.set(num_layers=3, scan_unroll=3)
    policy.block.attention.rope.theta = 1e5  # texts are up to 1,600 tokens long
    cfg.learner.schedule.set(peak_lr=6e-3, end_lr=2e-3, warmup_steps=30)
    return cfg.set(evaluators=())


def lookup_rl(*, seed: int = 0, steps: int = 20) -> RLExperiment.Config:
    """A LoRA policy learns to answer last, by what its base has found in two other roles."""
    tasks = lookup_tasks(seed)
    cfg = small_rl(
        *(lookup_sft(seed=seed), TOKENIZER, tasks, ExactMatch.Config(mixture=tasks)),
        max_prompt_tokens=192,
        max_new_tokens=192,
        num_steps=steps,
        samples_per_prompt=8,
        learner=small_learner(3e-3, 1e-3, warmup=5, steps=steps),
        engine=RolloutEngine.Config(max_num_seqs=64, steps_per_dispatch=4),
        evaluation=Evaluation.Config(problems_per_family=64),
    )
    low_rank(cfg)
    start = StartFrom.Config(path="runs/lookup_base", conversions=(WrapPlain.Config(),))
    cfg.trainer.checkpoint.set(save_every=10, keep=4)
    cfg.parameter_server.keep = 8
    return cfg.set(policies={"editor": {}}, warm_start=None, start_from=start, prompts_per_step=8, groups_per_lease=4)
