"""Recompilation guard: a call that would compile the train step again is an error that names what changed.

`jax.jit` silently compiles again when a shape, a dtype or a sharding differs, which on a large model costs minutes at
every occurrence. Here the compiled program itself is called: it refuses other arguments before any work is done, at no
cost to the calls that fit.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mesh.errors import UserError

Around = Callable[[], contextlib.AbstractContextManager[dict[str, Any]]]


class RecompilationError(UserError):
    """The step was called with other arguments than it was compiled for."""


class Leaf(NamedTuple):
    """Properties of an array that a program is compiled for."""

    shape: tuple[int, ...]
    dtype: str
    sharding: Any
    weak_type: bool


Signature = dict[str, Leaf]  # path, such as "batch/tokens" -> leaf


class CompiledStep:
    """`step(state, batch)` as one compiled program, or as many as the run allows.

    Attributes:
        step: the jitted function.
    """

    def __init__(self, step: Any, *, allowed: int = 1, around: Around = lambda: contextlib.nullcontext({})):
        """Take the step; it is compiled by the first call.

        Args:
            step: a jitted function of (state, batch).
            allowed: number of programs, one for each signature of the arguments.
            around: context entered while a program is compiled; the dict that it yields receives the program's memory
                on a device, in bytes: `arguments`, `outputs`, `temporaries`, `aliased`.
        """
        self.step, self._allowed, self._around = step, allowed, around
        self._programs: list[tuple[Signature, Any]] = []
        self._current: Any = None

    def of(self, step: Any) -> "CompiledStep":
        """Return another step, with the same limit and context."""
        return CompiledStep(step, allowed=self._allowed, around=self._around)

    @property
    def compiled(self) -> int:
        """Number of programs compiled so far."""
        return len(self._programs)

    def __call__(self, state: Any, batch: Any) -> Any:
        """Return the step's result. RecompilationError: it would have to be compiled once too often."""
        if self._current is None:
            return self._compile(state, batch, signature(state, batch))
        try:
            return self._current(state, batch)
        except (TypeError, ValueError):
            now = signature(state, batch)
            if not any(differences(known, now) == [] for known, _ in self._programs):
                return self._compile(state, batch, now)
            fits = next(program for known, program in self._programs if not differences(known, now))
            if fits is self._current:
                raise  # the arguments are not the reason
            self._current = fits
            return fits(state, batch)

    def _compile(self, state: Any, batch: Any, now: Signature) -> Any:
        if len(self._programs) >= self._allowed:
            changes = min((differences(known, now) for known, _ in self._programs), key=len)
            shown = "\n".join(f"  {change}" for change in changes[:8])
            more = f"\n  ... and {len(changes) - 8} more" if len(changes) > 8 else ""
            raise RecompilationError(
                "the train step is compiled for other arguments and would be compiled again "
                f"(max_compilations={self._allowed}); what changed:\n{shown}{more}\nMake all batches alike, or raise "
                "the trainer's max_compilations to the number of different shapes"
            )
        with self._around() as memory:
            program = self.step.lower(state, batch).compile()
            memory.update(_memory(program))
        self._programs.append((now, program))
        self._current = program
        return program(state, batch)


def signature(state: Any, batch: Any) -> Signature:
    """Return path -> properties of every array; donated arrays, whose content is gone, have them too."""
    leaves = jax.tree_util.tree_leaves_with_path({"state": state, "batch": batch})
    return {jax.tree_util.keystr(path, simple=True, separator="/"): _leaf(x) for path, x in leaves}


def differences(before: Signature, after: Signature) -> list[str]:
    """Return a line for each array that a program for `before` would refuse; weak types only beside others."""
    lines = [f"{name}: no such array before" for name in after if name not in before]
    lines += [f"{name}: missing" for name in before if name not in after]
    weak = []
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if old[:2] == new[:2] and _same_sharding(old, new):
            weak += [f"{name}: weak_type {old.weak_type} -> {new.weak_type}"] if old.weak_type != new.weak_type else []
            continue
        parts = [
            f"{field} {getattr(old, field)} -> {getattr(new, field)}"
            for field in ("shape", "dtype", "weak_type")
            if getattr(old, field) != getattr(new, field)
        ]
        if not _same_sharding(old, new):
            parts.append(f"sharding {_shown(old.sharding, new.sharding)} -> {_shown(new.sharding, old.sharding)}")
        lines.append(f"{name}: {', '.join(parts)}")
    return sorted(lines) + (sorted(weak) if lines else [])


def _leaf(x: Any) -> Leaf:
    aval = jax.typeof(x)
    return Leaf(tuple(aval.shape), str(aval.dtype), getattr(x, "sharding", None), bool(getattr(aval, "weak_type", 0)))


def _same_sharding(old: Leaf, new: Leaf) -> bool:
    if old.sharding is None or new.sharding is None or old.sharding == new.sharding:
        return True
    return len(old.shape) == len(new.shape) and old.sharding.is_equivalent_to(new.sharding, len(old.shape))


def _shown(sharding: Any, other: Any) -> str:
    """Return the partition if that is what differs, else the whole sharding."""
    mine, others = getattr(sharding, "spec", None), getattr(other, "spec", None)
    return str(sharding) if mine is None or mine == others else str(mine)


def _memory(program: Any) -> dict[str, int]:
    """Return the bytes of one device that the compiler reports; empty where it reports none."""
    found = program.memory_analysis()
    names = {"arguments": "argument", "outputs": "output", "temporaries": "temp", "aliased": "alias"}
    if found is None:
        return {}
    return {name: int(getattr(found, f"{what}_size_in_bytes")) for name, what in names.items()}
