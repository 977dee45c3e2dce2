"""The names of adapters, and the slots of the bank that they have.

An adapter that is replaced or unloaded keeps its slot until the requests that use it have ended; its successor has
another one. So no request changes its adapter on the way.
"""

import dataclasses
from collections.abc import Callable, Collection

from axlearn_like.layers.wrappers.adapters import Adapter
from mesh import UserError, did_you_mean
from rl.rollout.model_runner.adapter_bank import AdapterBank


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in the bank."""

    name: str  # name that requests ask for
    slot: int  # place in the bank
    number: int  # another one for every load, of the same name too: keys and values of one are none of another's
    rank: int  # rank of this one
    version: int = 0  # version of the policy that it is, which rollouts record

    @property
    def key(self) -> tuple[str, int]:
        """The part of a cache key that says which adapter keys and values were computed with."""
        return self.name, self.number


class AdapterSlots:
    """Adapters by name; `busy` gives those of unfinished requests."""

    def __init__(self, slots: int, busy: Callable[[], Collection[LoadedAdapter]]):
        """`slots`: as many adapters at the same time, from slot 1 on."""
        self._slots, self._busy = slots, busy
        self._loaded: dict[str, LoadedAdapter] = {}
        self._loads = 0

    @property
    def loaded(self) -> dict[str, LoadedAdapter]:
        """The adapters that requests can ask for, by name."""
        return dict(self._loaded)

    def find(self, name: str, where: str = "") -> LoadedAdapter:
        """Return the adapter of this name (UserError: begins with `where`, and has the nearest name)."""
        if name not in self._loaded:
            known = ", ".join(sorted(self._loaded)[:8]) or "none"
            raise UserError(
                f"{where}no adapter {name!r} is loaded; there are: {known}{did_you_mean(name, self._loaded)}"
            )
        return self._loaded[name]

    def load(
        self, name: str, adapter: Adapter, version: int, bank: AdapterBank | None
    ) -> tuple[LoadedAdapter, LoadedAdapter | None]:
        """Write an adapter into a free slot of the bank; returns it and the one of the same name that it replaces.

        Raises:
            UserError: there is no bank, all slots are taken, or the adapter does not fit; nothing has changed.
        """
        if bank is None:
            raise UserError(f"adapter {name!r}: this engine has no room for adapters")
        try:
            bank.check(adapter)
        except UserError as error:
            raise UserError(f"adapter {name!r}: {error}") from None
        old = self._loaded.get(name)
        taken = {one.slot for one in self._busy()}
        taken |= {one.slot for one in self._loaded.values() if one is not old}
        free = [slot for slot in range(1, self._slots + 1) if slot not in taken]
        if not free:
            held = ", ".join(sorted(self._loaded)) or "none"
            leaving = len(set(self._busy()) - set(self._loaded.values()))
            rest = f", and {leaving} of unfinished requests" if leaving else ""
            raise UserError(f"adapter {name!r}: all {self._slots} slots are taken, by {held}{rest}; unload one")
        self._loads += 1
        self._loaded[name] = LoadedAdapter(name, free[0], self._loads, adapter.rank, version)
        bank.put(free[0], adapter)
        return self._loaded[name], old

    def drop(self, name: str) -> LoadedAdapter:
        """Take the name from an adapter, whose slot is free when its requests have ended (UserError: none such)."""
        found = self.find(name)
        del self._loaded[name]
        return found
