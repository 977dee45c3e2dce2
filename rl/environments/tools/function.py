"""A function of the user's own as a tool: its schema is made from its signature, its description from its docstring."""

import inspect
from collections.abc import Callable
from typing import Any, override

from axlearn_like.config import REQUIRED
from rl.environments.tools.schema import schema_of
from rl.environments.tools.tool import Tool


class FunctionTool(Tool):
    """Tool of a top-level function, plain or async; what it returns is shown as text, or as JSON."""

    class Config(Tool.Config):
        function: Callable[..., Any] = REQUIRED
        parameters: dict[str, Any] | None = None  # a JSON schema in place of the one that is made from the signature

        @override
        def check_fields(self) -> None:
            super().check_fields()
            if self.parameters is None:
                return
            taken = inspect.signature(self.function).parameters
            unknown = [name for name in self.parameters.get("properties", {}) if name not in taken]
            free = any(one.kind is one.VAR_KEYWORD for one in taken.values())
            self.require("parameters", free or not unknown, f"parameters of the function: {', '.join(taken) or 'none'}")

        @override
        def title(self) -> str:
            return self.name or getattr(self.function, "__name__", "")

        @override
        def text(self) -> str:
            return self.description or (inspect.getdoc(self.function) or "").partition("\n\n")[0]

        @override
        def schema(self) -> dict[str, Any]:
            return schema_of(self.function) if self.parameters is None else self.parameters

        @override
        def schema_field(self) -> str:
            return "function" if self.parameters is None else "parameters"

    def __init__(self, cfg: Config):
        self._function = cfg.function

    @override
    def call(self, **arguments: Any) -> Any:
        return self._function(**arguments)
