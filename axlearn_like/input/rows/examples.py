"""Files of rows as sources of training examples, read by the form of their rows unless the columns are named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, override

from axlearn_like.config import ConfigBase
from axlearn_like.input.chat import Chat
from axlearn_like.input.encoding import Document, PromptAnswer
from axlearn_like.input.file_source import FileSource, Record
from axlearn_like.input.labelled import LabelledLines
from axlearn_like.input.preferences import Preference
from axlearn_like.input.rows.forms import RowForm, find_form
from axlearn_like.input.rows.tables import find_tables, read_records
from axlearn_like.tokenizers.protocol import Tokenizer


class SupervisedRows(FileSource):
    """Rows of files of any format of `read_rows`, as examples of supervised fine-tuning."""

    class Config(FileSource.Config):
        split: str = "train"  # split of a directory
        example: ConfigBase | None = None  # Chat, PromptAnswer, Document, ...; None: by the form of the rows

    def __init__(self, cfg: Config):
        self._split = cfg.split
        if cfg.example is None:
            tokenizer = cfg.tokenizer.build() if cfg.tokenizer else None
            form = find_form(cfg.files, cfg.split)
            cfg = cfg.clone(example=chat_example(form, f"{cfg.files}", templated=_templated(tokenizer)))
        super().__init__(cfg)

    @override
    def find(self, files: str | tuple[str, ...], origin: str) -> list[Path]:
        return find_tables(files, self._split)

    @override
    def records(self, path: Path, fields: tuple[str, ...]) -> Iterator[Record]:
        return read_records(path)


class PairRows(LabelledLines):
    """Rows of files of any format of `read_rows`, as pairs of a preferred completion and another."""

    class Config(LabelledLines.Config):
        example: ConfigBase | None = None  # Preference, ...; None: by the form of the rows

    def __init__(self, cfg: Config):
        if cfg.example is None:
            templated = _templated(cfg.tokenizer.build())
            cfg = cfg.clone(example=pair_example(find_form(cfg.files), f"{cfg.files}", templated=templated))
        super().__init__(cfg)


def chat_example(form: RowForm, where: str, *, templated: bool) -> ConfigBase:
    """Return how rows of a form become examples of supervised fine-tuning.

    Args:
        templated: the tokenizer has a chat template, by which a question and its answer are a conversation.

    Raises:
        InputError: the rows have no answers to learn.
    """
    form.require("sft", where)
    said: dict[str, Any] = {"tools": form.tools, "system": form.system}
    answer = form.completion or form.answer
    if form.answered and form.messages is not None:
        return Chat.Config(messages=form.messages, **said)
    if form.prompt is None or answer is None:
        return Document.Config(text=form.text or "text")
    if templated or form.asks:
        return Chat.Config(turns=(form.prompt, answer), **said)
    return PromptAnswer.Config(prompt=form.prompt, answer=answer)


def pair_example(form: RowForm, where: str, *, templated: bool) -> Preference.Config:
    """Return how rows of a form become pairs; see `chat_example`."""
    form.require("pairs", where)
    names: dict[str, Any] = {
        "chosen": form.chosen,
        "rejected": form.rejected,
        "tools": form.tools,
        "system": form.system,
    }
    return Preference.Config(prompt=form.prompt, chat=templated and form.prompt is not None, **names)


def _templated(tokenizer: Tokenizer | None) -> bool:
    return tokenizer is not None and tokenizer.chat_template is not None
