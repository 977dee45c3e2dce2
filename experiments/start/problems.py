"""The rows of a file as problems of RL: split, measured by the tokenizer, and shown as they are read."""

import dataclasses
import re
from typing import Any, Self

from axlearn_like.input.rows.forms import find_form, first_rows
from axlearn_like.tokenizers.chat import marked_chat
from experiments.start.base import BaseModel
from experiments.start.options import StartOptions
from experiments.start.plan import Plan, held_out_every
from rl.protocol.messages import Problem
from rl.tasks.encoding import encode_problem, encode_solution, messages_of
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.columns import form_columns
from rl.tasks.rows.sources import RowFiles
from rl.tasks.rows.task_rows import TaskRows

_MEASURED = 2_000  # rows whose lengths are measured, evenly spaced
_COMPARED = 64  # answers that say how answers are compared
_NUMBER = re.compile(r"\s*[-+]?\$?(\d[\d,]*\.?\d*|\.\d+)%?\s*")
MARK = "####"  # mark of GSM8K before the final number of a worked answer


@dataclasses.dataclass(frozen=True)
class Problems:
    """Rows as problems.

    Attributes:
        files: what was read.
        tasks: config of the mixture of the rows alone.
        trained: number of rows to train on.
        heldout: number of those held out.
        first: first rows as problems, with their places in the file.
        prompt_lengths: tokens of the measured rows' prompts.
        answer_lengths: tokens of their answers, the end included; none where rows have no answer.
        compared: how answers are compared by default: "number", "mark", "math", "text"; None: there are none.
        model: the model, with its tokenizer.
    """

    files: str
    tasks: TaskMixture.Config
    trained: int
    heldout: int
    first: list[tuple[Problem, str]]
    prompt_lengths: list[int]
    answer_lengths: list[int]
    compared: str | None
    model: BaseModel

    @classmethod
    def read(cls, options: StartOptions, model: BaseModel, plan: Plan) -> Self:
        """Read all rows, and note how they are split and compared (UserError: a row does not fit)."""
        files = options.rows("data")
        heldout = None if options.heldout is None else options.rows("heldout")
        form = find_form(files, **options.named)
        model.require_template(form, files)
        columns = form_columns(form, files, reference=False)  # `choose_scorer` refuses rows without one
        reader = columns.build()
        compared = columns.answer and _compared([reader.answer(*row) for row in first_rows(files, count=_COMPARED)])
        columns.final = "number" if compared in ("number", "mark") else "text"
        columns.answer_after = MARK if compared == "mark" else ""
        others = None if heldout is None else RowFiles.Config(files=heldout)
        family = TaskRows.Config(
            label=options.names[1], rows=RowFiles.Config(files=files), heldout=others, columns=columns
        )
        source: Any = family.build(seed=options.seed)
        source.split(0)
        count = source.sizes[0]
        every = held_out_every(count)
        source.split(every)
        trained, held = source.sizes
        read = ", ".join(f"{part} = {name}" for part, name in form.parts.items())
        left = f"; left: {', '.join(form.left)}" if form.left else ""
        plan.say("--data", f"{trained} rows to train on", f"{files} ({read}{left})")
        plan.say("held out", held, heldout or f"one in {every}, by a hash of the prompt")
        tasks = TaskMixture.Config(families=(family,), seed=options.seed, heldout_every=every)
        measured = [source.make(item, item) for item in range(0, count, max(1, count // _MEASURED))]
        solved = [encode_solution(one, one.answer, model.built) for one in measured if compared]
        return cls(
            files,
            tasks,
            trained,
            held,
            [(source.make(n, n), where) for n, (_, where) in enumerate(first_rows(files, count=3))],
            [len(encode_problem(one, model.built)) for one in measured],
            [len(answer) for _, answer in solved],
            compared,
            model,
        )

    def examples(self) -> tuple[tuple[str, str], ...]:
        """Return prompt and answer of the first two rows as text, the prompt as the chat template writes it."""
        return tuple((self._text(problem), problem.answer) for problem, _ in self.first[:2])

    def _text(self, problem: Problem) -> str:
        if self.model.built.chat_template is None:
            return "\n\n".join(message["content"] for message in messages_of(problem)) + "\n"
        return marked_chat(self.model.built, messages_of(problem), tools=problem.tools, add_generation_prompt=True)


def _compared(texts: list[str]) -> str:
    if all(MARK in text for text in texts):
        return "mark"
    if all(_NUMBER.fullmatch(text) for text in texts):
        return "number"
    return "math" if any("\\" in text for text in texts) else "text"
