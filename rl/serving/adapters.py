"""Adapters that a server serves beside its base model, each a model by its own name."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from axlearn_like.layers.wrappers.adapters import Adapter
from mesh import UserError, did_you_mean
from rl.serving.engine_thread import EngineThread
from rl.serving.errors import ApiError, bad_field
from rl.serving.input.fields import Fields

LONGEST_NAME = 128  # characters


class ServedAdapters:
    """Names of adapters, and the directories that they came from.

    A client may have others loaded only where the server has a directory for them and an API key: reading files at a
    client's word is not for every program that reaches the port.
    """

    def __init__(
        self, base: str, read: Callable[[Path], Adapter] | None = None, root: Path | None = None, *, keyed: bool = False
    ):
        """Begin without adapters.

        Args:
            base: name of the base model.
            read: returns the adapter of a directory, for this base.
            root: the directory in which clients may name adapters; None: they may not.
            keyed: the server has an API key.
        """
        self._base, self._read = base, read
        self._root = None if root is None else root.expanduser().resolve()
        self._keyed = keyed
        self._paths: dict[str, Path] = {}
        self._loading = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """Names that requests may give, the base's first."""
        return [self._base, *self._paths]

    def add(self, name: str, path: Path) -> None:
        """Record an adapter that the engine has."""
        self._paths[name] = path

    def find(self, name: str) -> str | None:
        """Return the adapter of a model's name, None for the base (ApiError: 404 with the nearest name)."""
        if name == self._base:
            return None
        if name not in self._paths:
            known = ", ".join(map(repr, self.names[:8]))
            said = (
                f"model: no model {name[:LONGEST_NAME]!r} here; this server has {known}{did_you_mean(name, self.names)}"
            )
            raise ApiError(404, said, param="model", code="model_not_found")
        return name

    def card(self, name: str) -> dict[str, Any]:
        """Return what a list of models says of an adapter and does not of a base."""
        return {"root": str(self._paths[name]), "parent": self._base} if name in self._paths else {}

    async def load(self, body: Any, engine: EngineThread) -> str:
        """Load an adapter as a body `{"lora_name": ..., "lora_path": ...}` says; returns what was done.

        Raises:
            ApiError: it is not allowed here, the body is wrong, or the adapter cannot be read or does not fit.
        """
        self._check_allowed()
        fields = Fields(body)
        name, path, replace = fields.take_text("lora_name"), fields.take_text("lora_path"), False
        if name is None or path is None:
            raise fields.missing("lora_name" if name is None else "lora_path", "text")
        replace = fields.take_bool("load_inplace")
        fields.finish()
        folder = self._inside(path)
        async with self._loading:
            if name in self._paths and not replace:
                raise bad_field("lora_name", f"{name!r} is loaded already; load_inplace=true replaces it")
            await self._guarded(self._load(name, folder, engine))
        return f"adapter {name!r} is loaded"

    async def unload(self, body: Any, engine: EngineThread) -> str:
        """Unload the adapter that a body `{"lora_name": ...}` names; returns what was done."""
        self._check_allowed()
        fields = Fields(body)
        name = fields.take_text("lora_name")
        fields.take("lora_int_id")  # field of vLLM's clients
        fields.finish()
        if name is None:
            raise fields.missing("lora_name", "text")
        async with self._loading:
            if self.find(name) is None:
                raise bad_field("lora_name", f"{name!r} is the base model")
            await self._guarded(asyncio.wrap_future(engine.unload_adapter(name)))
            del self._paths[name]
        return f"adapter {name!r} is unloaded"

    async def _load(self, name: str, folder: Path, engine: EngineThread) -> None:
        check_name(name, self._base)
        assert self._read is not None
        adapter = await asyncio.to_thread(self._read, folder)
        await asyncio.wrap_future(engine.load_adapter(name, adapter))
        self._paths[name] = folder

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except UserError as error:
            raise ApiError(400, str(error), code="adapter_refused") from None

    def _check_allowed(self) -> None:
        if self._read is None or self._root is None:
            raise ApiError(403, "adapters are not loaded at run time here; see --adapters-from", code="not_allowed")
        if not self._keyed:
            raise ApiError(403, "adapters are loaded at run time with an API key alone; see --api-key", code="no_key")

    def _inside(self, path: str) -> Path:
        """Return the directory of a path, absolute or in the server's directory of adapters, and never outside it."""
        assert self._root is not None
        try:
            folder = (self._root / path).resolve()
            inside = folder.is_relative_to(self._root) and folder.is_dir()
        except (OSError, ValueError, RuntimeError):
            inside, folder = False, self._root
        if not inside:
            raise bad_field("lora_path", "expected a directory in the one that the server was started with")
        return folder


def check_name(name: str, base: str) -> None:
    """Refuse a name that no client could give, or that is the base's (UserError)."""
    if name == base:
        raise UserError(f"adapter {name!r}: the base model has this name")
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable() or name != name.strip():
        raise UserError(f"adapter {name[:LONGEST_NAME]!r}: expected a name of 1 to {LONGEST_NAME} printable characters")
