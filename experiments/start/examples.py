"""The rows of a file as examples of supervised fine-tuning, or as pairs: split, measured, and shown."""

import dataclasses
from typing import Any, Self

import numpy as np

from axlearn_like.config import ConfigBase
from axlearn_like.input.rows.examples import PairRows, SupervisedRows, chat_example, pair_example
from axlearn_like.input.rows.forms import find_form
from experiments.start.base import BaseModel
from experiments.start.options import StartOptions
from experiments.start.plan import Plan, held_out_every
from experiments.start.split import HeldOutSplit
from mesh.errors import UserError

_MEASURED = 10_000  # examples whose lengths are measured, evenly spaced


@dataclasses.dataclass(frozen=True)
class Examples:
    """Rows as examples.

    Attributes:
        train: config of the source to train on.
        heldout: config of the source of held-out examples; None: there are too few.
        tokens: number of tokens of all examples to train on, estimated from those measured.
        longest: tokens of the longest.
        shown: first two as text: what is given, and what is learned.
    """

    train: ConfigBase[Any]
    heldout: ConfigBase[Any] | None
    tokens: int
    longest: int
    shown: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, options: StartOptions, model: BaseModel, plan: Plan) -> Self:
        """Read and measure all rows, and note how they are split (UserError: a row does not fit)."""
        files = options.rows("data")
        whole = _rows(files, options, model)
        source: Any = whole.build()
        length, where = source.longest
        if model.context is not None and length - 1 > model.context:
            raise UserError(
                f"--data: {where} has {length} tokens, and {model.path.name} knows {model.context} positions; expected "
                "shorter rows, or a model of a longer context"
            )
        every, count = held_out_every(len(source)), len(source)
        train, heldout = whole, None
        if options.heldout is not None:
            heldout = _rows(options.rows("heldout"), options, model)
            held, how = len(heldout.build()), f"all of {options.heldout}"  # pyright: ignore[reportArgumentType]
        else:
            train, sides = HeldOutSplit.Config(source=whole, every=every), HeldOutSplit.sizes(source, every)
            (count, held), how = sides, f"one in {every}, by a hash of the prompt"
            if not count:
                raise UserError(f"--data {files}: {held} rows of one prompt; expected several, to hold some out")
            heldout = HeldOutSplit.Config(source=whole, every=every, heldout=True) if held else None
        lengths = [len(source[n]["tokens"]) for n in range(0, len(source), max(1, len(source) // _MEASURED))]
        plan.say("--data", f"{count} rows to train on", files)
        plan.say("held out", held, how)
        shown = tuple(_text(source[n], model) for n in range(min(2, len(source))))
        return cls(train, heldout, int(np.mean(lengths) * count), length, shown)


def _rows(files: str, options: StartOptions, model: BaseModel) -> ConfigBase[Any]:
    """Return the config of the source of a file's examples, by the form of its rows."""
    form, templated = find_form(files, **options.named), model.built.chat_template is not None
    model.require_template(form, files)
    if options.pairs:
        example = pair_example(form, files, templated=templated)
        return PairRows.Config(files=files, tokenizer=model.tokenizer, example=example)
    example = chat_example(form, files, templated=templated)
    return SupervisedRows.Config(files=files, tokenizer=model.tokenizer, example=example)


def _text(example: dict[str, np.ndarray], model: BaseModel) -> tuple[str, str]:
    """Return what is given, and what is learned, as text."""
    learned = example["sides"] > 0 if "sides" in example else example["loss_mask"]
    first = int(np.argmax(learned))
    given, drawn = example["tokens"][:first], example["tokens"][np.flatnonzero(learned)]
    return model.built.decode(given.tolist()), model.built.decode(drawn.tolist())
