"""Forms of a tool call in the text of an action, and of what comes back: plain text, or the JSON of chat models."""

import abc
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, override

from axlearn_like.config import ConfigBase, Configurable
from rl.environments.streaming.events import Event, Marks, tag_events
from rl.environments.streaming.json_calls import json_events

OPENING, CLOSING = "<tool_call>", "</tool_call>"  # marks of Hermes and Qwen


def json_or(text: Any, default: Any) -> Any:
    """Return what a text says as JSON, or `default` for what is no JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return default


class Call(NamedTuple):
    """A call as an action spells it."""

    tool: str = ""
    arguments: Mapping[str, Any] | None = None  # arguments by name; None: `text` holds them
    text: str = ""  # the only argument, or a JSON object of several
    error: str = ""  # fault of the form; "" for none


class CallForm(Configurable, abc.ABC):
    """Reader of the calls of an action, and writer of results. An action without a call is the final answer."""

    class Config(ConfigBase["CallForm"]):
        def stop_strings(self) -> tuple[str, ...]:
            """Return texts that end an action."""
            return ()

        def role(self) -> str:
            """Return the role of results in a chat template."""
            return "user"

        def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
            """Return a text for the prompt about tools (functions in the form of function calling); "" for none."""
            return ""

        def shows_schemas(self) -> bool:
            """Return True if the chat template is to show the tools by itself."""
            return False

    @abc.abstractmethod
    def calls(self, action: str) -> list[Call]:
        """Return the calls of an action, in order."""

    def events(self, action: str) -> list[Event]:
        """Return what is known of the calls of an action that is still being drawn; nothing if that is not read.

        Those of a longer text begin with those of a shorter one.
        """
        return []

    @abc.abstractmethod
    def results(self, results: Sequence[str]) -> str:
        """Return the text of results, in the order of the calls."""

    @abc.abstractmethod
    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a call, as a policy should write it."""


class TextCalls(CallForm):
    """`<tool>calculator: 3*4</tool>`, which ends the action; then comes `<result>12</result>`.

    One argument is written as it is, several as a JSON object. Short enough to be learned by a small policy.
    """

    class Config(CallForm.Config):
        opening: str = "<tool>"
        closing: str = "</tool>"
        result: str = "<result>{}</result>"  # {} is the place of the result
        described: bool = False  # put a description of the tools before the question, for policies that can read one

        @override
        def check_fields(self) -> None:
            self.require("opening", bool(self.opening.strip()), "a text that begins a call")
            self.require("closing", bool(self.closing.strip()), "a text that ends a call")
            self.require("result", self.result.count("{}") == 1, "a text with one {} in the place of the result")

        @override
        def stop_strings(self) -> tuple[str, ...]:
            return (self.closing,)

        @override
        def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
            if not self.described:
                return ""
            lines = [_line(tool["function"]) for tool in tools]
            form = f"{self.opening}NAME: INPUT{self.closing}"
            return f"Tools are called by {form}. The input of several parameters is a JSON object.\n" + "\n".join(lines)

    def __init__(self, cfg: Config):
        self._cfg = cfg
        opening, closing = re.escape(cfg.opening), re.escape(cfg.closing)
        self._whole = re.compile(rf"{opening}\s*(\w+)\s*:(.*?){closing}", re.DOTALL)
        head = re.compile(r"\s*(\w+)\s*:")
        self._marks = Marks(cfg.opening, cfg.closing, head, ":", strips=True)

    @override
    def calls(self, action: str) -> list[Call]:
        found = [Call(tool=match[1], text=match[2].strip()) for match in self._whole.finditer(action)]
        if not found and (self._cfg.opening in action or self._cfg.closing in action):
            return [Call(error=f"expected {self._cfg.opening}NAME: INPUT{self._cfg.closing}")]
        return found

    @override
    def events(self, action: str) -> list[Event]:
        return list(tag_events(action, self._marks))

    @override
    def results(self, results: Sequence[str]) -> str:
        return "".join(self._cfg.result.replace("{}", result) for result in results)

    @override
    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        (value,) = arguments.values() if len(arguments) == 1 else (json.dumps(dict(arguments)),)
        return f"{self._cfg.opening}{tool}: {value}{self._cfg.closing}"


class FencedCalls(CallForm):
    """Fenced blocks of code, any number in an action; the language is the tool, the code its only argument.

    Results come in a fenced block of their own, with the language "output".
    """

    class Config(CallForm.Config):
        languages: tuple[str, ...] = ("python",)

        @override
        def check_fields(self) -> None:
            named = bool(self.languages) and all(language.isidentifier() for language in self.languages)
            self.require("languages", named, "names of tools")

        @override
        def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
            return f"Code in fenced blocks ({', '.join(self.languages)}) is run, and its output shown."

    def __init__(self, cfg: Config):
        names = "|".join(map(re.escape, cfg.languages))
        self._whole = re.compile(rf"```({names})[ \t]*\n(.*?)\n```", re.DOTALL)
        self._marks = Marks("```", "\n```", re.compile(rf"({names})[ \t]*\n"), "\n", strips=False)

    @override
    def calls(self, action: str) -> list[Call]:
        return [Call(tool=match[1], text=match[2]) for match in self._whole.finditer(action)]

    @override
    def events(self, action: str) -> list[Event]:
        return list(tag_events(action, self._marks))

    @override
    def results(self, results: Sequence[str]) -> str:
        return "".join(f"\n```output\n{result}\n```\n" for result in results)

    @override
    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        (code,) = arguments.values()
        return f"```{tool}\n{code}\n```"


class JsonCalls(CallForm):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number in an action (Hermes, Qwen).

    The chat template shows the tools by their schemas, and gets results as messages of the role "tool".
    """

    class Config(CallForm.Config):
        @override
        def role(self) -> str:
            return "tool"

        @override
        def shows_schemas(self) -> bool:
            return True

    def __init__(self, cfg: Config):
        del cfg

    @override
    def calls(self, action: str) -> list[Call]:
        pieces = action.split(OPENING)[1:]
        return [self._read(piece.partition(CLOSING)) for piece in pieces]

    @override
    def events(self, action: str) -> list[Event]:
        return list(json_events(action, OPENING, CLOSING))

    @override
    def results(self, results: Sequence[str]) -> str:
        return "\n</tool_response>\n<tool_response>\n".join(results)  # a template writes the first and the last

    @override
    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps({"name": tool, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"{OPENING}\n{body}\n{CLOSING}"

    def _read(self, parts: tuple[str, str, str]) -> Call:
        body, closing, _ = parts
        if not closing:
            return Call(error=f"{CLOSING} is missing")
        try:
            call = json.loads(body)
        except (ValueError, RecursionError) as error:
            return Call(error=f"not JSON: {error}")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return Call(error='expected {"name": ..., "arguments": {...}}')
        return Call(call["name"], call.get("arguments", {}))


def _line(function: Mapping[str, Any]) -> str:
    parameters = function["parameters"].get("properties", {})
    names = ", ".join(f"{name}: {one.get('type', 'any')}" for name, one in parameters.items())
    return f"{function['name']}({names}): {function['description']}"
