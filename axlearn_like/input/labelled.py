"""Labelled input: rows whose targets are labels of tokens (classes, scores, preferences), not the next tokens.

A source of labelled examples has `labelled = True`; its examples are `{"tokens": int32[n], "labels": float32[n]}` with
NaN where a token has no label. A sequence's label is that of its last token. An example may hold several sequences,
whose `positions` (int32[n]) restart at 0; they stay side by side in one row.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, override, runtime_checkable

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input.batches import BatchStream
from axlearn_like.input.encoding import field_of, required_tokenizer, text_of
from axlearn_like.input.rows.tables import find_tables, read_rows
from axlearn_like.input.source import IndexedSource, InputError, LabelledReadAhead
from axlearn_like.input.supervised import Contents, SupervisedInput
from axlearn_like.tokenizers.inside import encode_inside
from axlearn_like.tokenizers.protocol import Tokenizer, begin
from mesh.errors import did_you_mean


class LabelledStream(BatchStream):
    """Batches whose `targets` are labels, float32."""

    @override
    def _fill_piece(
        self, source: IndexedSource, index: int, start: int, stop: int, out: dict[str, np.ndarray], learned: np.ndarray
    ) -> None:
        assert isinstance(source, LabelledReadAhead), "checked by the input"
        super()._fill_piece(source, index, start, stop, out, learned)
        labels, positions = source.labels(index)
        out["targets"][:], out["positions"][:] = np.where(learned, labels, 0), positions


class LabelledInput(SupervisedInput):
    """A `SupervisedInput` of labelled examples: `targets` float32, `weights` on the tokens that have labels."""

    class Config(SupervisedInput.Config):
        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("long", self.long == "refuse", "refuse: a part of a text does not have its label")

        @property
        @override
        def dtypes(self) -> dict[str, str]:
            return {**super().dtypes, "targets": "float32"}

        @property
        @override
        def contents(self) -> Contents:
            return "labels"

    _stream = LabelledStream
    _labelled = True


def labelled_text(tokens: Sequence[int] | np.ndarray, label: float) -> dict[str, np.ndarray]:
    """Return the example of a sequence with one label, on its last token."""
    labels = np.full(len(tokens), np.nan, np.float32)
    labels[-1:] = label
    return {"tokens": np.asarray(tokens, np.int32), "labels": labels}


class TextLabel(Configurable):
    """A record's text, and its class or score."""

    class Config(ConfigBase["TextLabel"]):
        text: str = "text"  # field
        label: str = "label"  # field
        classes: tuple[str, ...] = ()  # names of classes 0, 1, ...; (): labels are numbers

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None):
        self._tokenizer, self._cfg = required_tokenizer(tokenizer, cfg), cfg

    def encode(self, record: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
        """Return the labelled example of bos, text, eos."""
        text, label = text_of(record, self._cfg.text, where), field_of(record, self._cfg.label, where)
        value = _label(label, self._cfg.classes, where, f"expected {self._cfg.label!r} to be")
        return labelled_text([*begin(self._tokenizer), *self._tokenizer.encode(text), self._tokenizer.eos], value)


def step_tokens(tokenizer: Tokenizer, prompt: str, steps: Sequence[str], separator: str) -> tuple[list[int], list[int]]:
    """Return bos, prompt, separator, then each step with a separator behind it, eos; and where each step ends."""
    tokens, ends = [*begin(tokenizer), *tokenizer.encode(prompt + separator)], []
    for step in steps:
        tokens += encode_inside(tokenizer, step, tokens)
        tokens += encode_inside(tokenizer, separator, tokens)
        ends.append(len(tokens) - 1)
    return [*tokens, tokenizer.eos], ends


class StepLabels(Configurable):
    """A prompt, the steps of its solution, and a label of each step: what a process reward model learns from.

    The sequence is bos, prompt, separator, then each step with a separator behind it, and eos. A step's label is on the
    last token of its separator, where the model has seen the step and nothing of the next one. The fields have the
    names of TRL's stepwise supervision.
    """

    class Config(ConfigBase["StepLabels"]):
        prompt: str = "prompt"  # field
        steps: str = "completions"  # field: a list of texts, or one text that is split at the separator
        labels: str = "labels"  # field: a list with a label for each step; null: the step has none
        classes: tuple[str, ...] = ()  # names of classes 0, 1, ...; (): labels are numbers, true and false are 1 and 0
        separator: str = "\n"

        @override
        def check_fields(self) -> None:
            self.require("separator", bool(self.separator), "a text, whose last token has the label of a step")

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None):
        self._tokenizer, self._cfg = required_tokenizer(tokenizer, cfg), cfg

    def encode(self, record: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
        """Return the labelled example of a record."""
        cfg, tokenizer = self._cfg, self._tokenizer
        steps, labels = self._steps(record, where)
        tokens, ends = step_tokens(tokenizer, text_of(record, cfg.prompt, where), steps, cfg.separator)
        values = np.full(len(tokens), np.nan, np.float32)
        for number, (end, label) in enumerate(zip(ends, labels, strict=True)):
            if label is not None:
                what = f"expected {cfg.labels!r}[{number}] to be null or"
                values[end] = _label(label, cfg.classes, where, what)
        if np.isnan(values).all():
            raise InputError(f"{where}: no step has a label")
        return {"tokens": np.asarray(tokens, np.int32), "labels": values}

    def _steps(self, record: Mapping[str, Any], where: str) -> tuple[list[str], list[Any]]:
        cfg = self._cfg
        steps, labels = field_of(record, cfg.steps, where), field_of(record, cfg.labels, where)
        if isinstance(steps, str):
            steps = steps.removesuffix(cfg.separator).split(cfg.separator)
        if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
            raise InputError(f"{where}: expected {cfg.steps!r} to be a list of texts, or a text, got {steps!r:.60}")
        if not isinstance(labels, list) or len(labels) != len(steps):
            found = f"{len(labels)} labels" if isinstance(labels, list) else f"{labels!r:.60}"
            raise InputError(f"{where}: expected {cfg.labels!r} to be a list of {len(steps)} labels, got {found}")
        return steps, labels


@runtime_checkable
class Joining(Protocol):
    """An encoding whose examples are made of several records."""

    def joined(self, records: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """Return the example of each of these results of `encode`."""
        ...


class LabelledLines(Configurable):
    """Labelled examples in files of rows; all are tokenised at the start, and held."""

    labelled = True

    class Config(ConfigBase["LabelledLines"]):
        files: str | tuple[str, ...] = REQUIRED  # paths, globs and directories of datasets, see `find_tables`
        tokenizer: ConfigBase = REQUIRED
        example: ConfigBase | None = TextLabel.Config()  # TextLabel, StepLabels, Preference or UnpairedPreference

    def __init__(self, cfg: Config):
        if cfg.example is None:
            raise InputError("LabelledLines.example: expected a conversion of rows, such as Preference")
        encoding = cfg.example.build(tokenizer=cfg.tokenizer.build())
        places = [place for path in find_tables(cfg.files) for place in read_rows(path)]
        examples = [encoding.encode(record, where) for record, where in places]
        self._examples = encoding.joined(examples) if isinstance(encoding, Joining) else examples
        sizes = [len(example["tokens"]) for example in self._examples]
        at = int(np.argmax(sizes)) if sizes else 0
        self.longest = (sizes[at] + 1, places[at][1]) if sizes else (0, "")  # an input counts one token more

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._examples[index]


def _label(label: Any, classes: Sequence[str], where: str, what: str) -> float:
    """Return a label as a number: itself, or that of its class. Raises InputError if it is neither."""
    if classes and label not in classes:
        raise InputError(f"{where}: no class {label!r}{did_you_mean(str(label), classes, limit=len(classes))}")
    if not classes and not isinstance(label, int | float):
        raise InputError(f"{where}: {what} a number, got {label!r:.60}; or set classes")
    return classes.index(label) if classes else label
