"""Chat templates in Jinja, as model directories carry them: rendered as transformers does, in a sandbox.

A template comes with a model from anywhere, so it is code of a stranger: it sees plain JSON values only, and Jinja's
immutable sandbox keeps it from the interpreter behind them.
"""

import copy
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from axlearn_like.tokenizers.files import located
from mesh.errors import UserError, install_hint

Message = Mapping[str, Any]

# The names under which a message may carry its reasoning; templates read one or another.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Where the last message is to be continued. The blank behind the mark shows whether the template trims what is said.
_MARK = "\ue002continued here\ue002"


class TemplateError(UserError, ValueError):
    """A chat template that cannot be read, or a conversation that it refuses."""


class JinjaTemplate:
    """A compiled template; safe to share between threads.

    Args:
        source: its text.
        special_tokens: the variables `bos_token`, `eos_token` and so on that the template may write.
        where: the file, for errors.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str = "chat template"):
        self.source, self.special_tokens, self.where = source, dict(special_tokens), where
        try:
            self._template = _environment().from_string(source)
        except _error() as error:
            line = getattr(error, "lineno", None)
            raise TemplateError(f"{where}, line {line} of the template: {error}") from None

    @classmethod
    def read(cls, path: str | Path, special_tokens: Mapping[str, str]) -> "JinjaTemplate":
        """Read a template's file, or `package:path` of an installed package.

        Raises:
            TemplateError: it cannot be read, or is no template.
        """
        place = located(str(path))
        try:
            return cls(place.read_text(encoding="utf-8"), special_tokens, where=str(place))
        except (OSError, UnicodeDecodeError) as error:
            raise TemplateError(f"{place}: cannot be read as a chat template: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, as `apply_chat_template(tokenize=False)` of transformers.

        Args:
            messages: objects with `role` and what else the template reads; a null counts as absent.
            tools: JSON schemas of functions.
            documents: objects with `title` and `text`.
            add_generation_prompt: end with the opening of the assistant's answer.
            continue_final_message: end within the last message, which the model goes on with.
            variables: further ones of the template, such as `enable_thinking`.

        Raises:
            TemplateError: what the template itself refuses, or fails on.
        """
        if not messages:
            raise TemplateError("a conversation needs at least one message")
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        said = [_aliased({name: v for name, v in message.items() if v is not None}) for message in _plain(messages)]
        last = _continued(said) if continue_final_message else ""
        try:
            text = self._template.render(
                **{**self.special_tokens, **_plain(variables or {})},
                messages=said,
                tools=_plain(tools),
                documents=_plain(documents),
                add_generation_prompt=add_generation_prompt,
            )
        except _error() as error:
            raise TemplateError(f"the chat template refuses this conversation: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            raise TemplateError(f"the chat template fails on this conversation: {error!r:.200}") from None
        return _cut(text, last) if continue_final_message else text


def _continued(messages: list[dict[str, Any]]) -> str:
    """Put the mark behind the last message's text; returns that text."""
    content = messages[-1].get("content")
    part = content
    if isinstance(content, list):
        part = next((p for p in reversed(content) if isinstance(p, dict) and isinstance(p.get("text"), str)), None)
    if isinstance(part, dict):
        text = part["text"]
        part["text"] = f"{text}{_MARK} "
        return text
    if not isinstance(part, str):
        raise TemplateError("continue_final_message: the last message has no text to continue")
    messages[-1]["content"] = f"{part}{_MARK} "
    return part


def _cut(text: str, last: str) -> str:
    at = text.rfind(_MARK)
    if at < 0 or last.strip() not in text:
        raise TemplateError("continue_final_message: the template does not write the last message as it is")
    kept = text[:at]
    return kept if text.startswith(" ", at + len(_MARK)) else kept.rstrip()


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under the names that templates read."""
    found = next((message[name] for name in _REASONING if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _plain(value: Any) -> Any:
    """Return a copy of JSON values; anything else is refused, as its methods would be open to the template."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return copy.copy(value)
    raise TemplateError(f"a conversation holds JSON values only, not {type(value).__name__}")


def _error() -> type[Exception]:
    if find_spec("jinja2") is None:
        raise UserError(f"a chat template needs the package jinja2; {install_hint('hf')}")
    from jinja2 import TemplateError as JinjaError

    return JinjaError


@functools.cache
def _environment() -> Any:
    """Return the sandbox with the options and functions that transformers gives templates."""
    error = _error()
    import jinja2.ext
    from jinja2.nodes import Node, Scope
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(jinja2.ext.Extension):
        """The block `{% generation %}`, which marks what an assistant has said; its text is what it holds."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body, lineno=line)

    class PlainNamespace(Namespace):
        """A namespace whose attributes cannot have the names of Python's own."""

        def __init__(*args: Any, **fields: Any) -> None:
            Namespace.__init__(*args, **fields)
            for name in dict(*args[1:], **fields):
                _check_name(name)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: str) -> None:
        if str(name).startswith("_"):
            raise error(f"a namespace has no attribute {name!r}")

    def refuse(message: str) -> None:
        raise error(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes what HTML would misread.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "namespace": PlainNamespace,
    }
    return environment
