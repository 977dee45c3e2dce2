"""The interface of a tool: a name, a schema of its parameters, and a call that returns text.

    class Dictionary(Tool):
        class Config(Tool.Config):
            name: str = "define"
            description: str = "Give the meaning of a word."

        def call(self, word: str) -> str:
            return MEANINGS.get(word, "unknown")

What a call raises is shown to the policy and counted; it is not the end of the episode.
"""

import abc
import types
from collections.abc import Mapping
from typing import Any, override

from axlearn_like.config import ConfigBase, Configurable
from rl.environments.tools.schema import SchemaError, check_schema, schema_of


class Diverged(Exception):
    """The arguments of a call are not those of which parts were run ahead."""


class PartialCall(abc.ABC):
    """A call that runs ahead while its arguments are written. Nothing of it lasts until `commit`."""

    @abc.abstractmethod
    def feed(self, name: str, text: str) -> None:
        """Read more of an argument: a whole line, or its end."""

    @abc.abstractmethod
    def finish(self, **arguments: Any) -> Any:
        """Return the result, or raise the error, that `call` would have for these arguments; `Diverged` if unknown."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Keep what the call has changed, after `finish`."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Drop what the call has changed."""


class ArgumentChecker(abc.ABC):
    """Reader of one argument that says when it can only fail."""

    @abc.abstractmethod
    def feed(self, text: str) -> str:
        """Read more of the argument, a whole line or its end; returns what is wrong, or ""."""


class Tool(Configurable, abc.ABC):
    """A tool, built once in each process that draws; `open` gives each episode its own state, if it needs any."""

    class Config(ConfigBase["Tool"]):
        name: str = ""
        description: str = ""
        pure: bool = False  # the same calls in the same order always return the same, and change nothing outside

        @override
        def check_fields(self) -> None:
            self.require("name", self.title().isidentifier(), "a name of letters, digits and underscores")
            try:
                check_schema(self.schema(), f"the schema of {self.title()}")
            except SchemaError as error:
                self.require(self.schema_field(), False, f"a tool with a schema ({error})")

        def title(self) -> str:
            """Return the name by which it is called."""
            return self.name

        def text(self) -> str:
            """Return what it does, in a sentence or two."""
            return self.description

        def schema(self) -> dict[str, Any]:
            """Return the JSON schema of its parameters: that of the annotations of `call`."""
            owner: Any = type(self).__owner__
            return schema_of(types.MethodType(owner.call, owner))

        def schema_field(self) -> str:
            """Return the field that the schema is made from, for messages."""
            return "name"

        def checker(self, name: str, row: Mapping[str, Any]) -> ArgumentChecker | None:
            """Return a reader of an argument, in an episode of a row, that finds what can only fail; None: none."""
            return None

        def described(self) -> dict[str, Any]:
            """Return its description in the form of function calling, which chat templates show."""
            about = {"name": self.title(), "description": self.text(), "parameters": self.schema()}
            return {"type": "function", "function": about}

    def open(self, row: Mapping[str, Any]) -> "Tool":
        """Return what an episode calls: an object with `call` and `close`, or the tool itself if it has no state."""
        return self

    @abc.abstractmethod
    def call(self, *args: Any, **arguments: Any) -> Any:
        """Return the result as text, or an awaitable of it; arguments come by name, as the schema has them."""

    def begin(self) -> PartialCall | None:
        """Begin a call of which the arguments are still being written; None: they are awaited."""
        return None

    def close(self) -> Any:
        """Free what `open` has made; called at the end of the episode."""

    def shutdown(self) -> None:
        """Free what the process holds."""
