"""Reader of a JSON object, field by field. Every error names the field, its value and what was expected.

Pydantic models for the same bodies, with the same errors, took 496 lines; `fields.py`, `request.py` and `prompts.py`
take 455.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mesh.errors import did_you_mean, nearest
from rl.serving.errors import ApiError, bad_field


class Fields:
    """Fields of an object. A null counts as absent, as clients write it for defaults.

    Each `take_*` raises `ApiError` (400) if the value does not fit; `finish` raises it for fields that were not taken.
    """

    def __init__(self, value: Any, where: str = ""):
        if not isinstance(value, dict):
            raise ApiError(400, f"{where or 'the body'} is {_kind(value)}; expected an object", param=where or None)
        self._values = {name: v for name, v in value.items() if v is not None}
        self._where = where
        self._known: list[str] = []

    def path(self, name: str) -> str:
        """Return the field's name as messages give it."""
        return f"{self._where}.{name}" if self._where else name

    def take(self, name: str) -> Any:
        """Return the value, of any kind, or None."""
        self._known.append(name)
        return self._values.pop(name, None)

    def take_bool(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def take_int(self, name: str, low: int, high: int, hint: str = "") -> int | None:
        """Return an integer in [low, high], or None."""
        value = self.take(name)
        if value is None:
            return None
        if not is_integer(value) or not low <= value <= high:
            raise self._wrong(name, value, f"an integer from {low} to {high}{hint}")
        return int(value)

    def take_number(self, name: str, low: float, high: float, *, open_low: bool = False) -> float | None:
        """Return a finite number in [low, high], or in (low, high], or None."""
        value = self.take(name)
        if value is None:
            return None
        if not is_number(value) or not low <= value <= high or (open_low and value == low):
            above = f"above {low:g} and up to" if open_low else f"from {low:g} to"
            raise self._wrong(name, value, f"a number {above} {high:g}")
        return float(value)

    def take_text(self, name: str) -> str | None:
        """Return a string, or None."""
        value = self.take(name)
        return None if value is None else text(value, self.path(name))

    def missing(self, name: str, expected: str) -> ApiError:
        """Return the error of an absent field, with the one that may have been meant by it."""
        # Only few and short names are compared: a client that sends many and long ones must not keep the server busy.
        near = nearest(name, [other for other in list(self._values)[:32] if len(other) < 40], 1)
        meant = f"; was it meant by {near[0]!r}?" if near else ""
        return bad_field(self.path(name), f"missing; expected {expected}{meant}")

    def refuse(self, name: str, neutral: Iterable[Any], hint: str = "") -> None:
        """Refuse a field that is not supported, unless its value asks for nothing."""
        value = self.take(name)
        if value is not None and value not in neutral:
            raise bad_field(self.path(name), f"not supported by this server; leave it out{hint}")

    def finish(self, ignored: Iterable[str] = (), neutral: Mapping[str, Iterable[Any]] | None = None) -> None:
        """Refuse the first field left but for `ignored` ones, and `neutral` ones whose values ask for nothing."""
        for name in ignored:
            self.take(name)
        for name, values in (neutral or {}).items():
            self.refuse(name, values)
        for name in self._values:
            # A string that no client would send may hold anything: it is quoted, and cut.
            raise ApiError(
                400,
                f"unknown field {self.path(name)[:80]!r}{did_you_mean(name[:80], self._known)}",
                param=self.path(name)[:80],
                code="unknown_field",
            )

    def _wrong(self, name: str, value: Any, expected: str) -> ApiError:
        return bad_field(self.path(name), f"got {shown(value)}; expected {expected}")


def text(value: Any, path: str) -> str:
    """Return `value` if it is a string that has a UTF-8 form."""
    if not isinstance(value, str):
        raise bad_field(path, f"got {_kind(value)}; expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise bad_field(path, "holds half of a surrogate pair, which is no character") from None
    return value


def checked_json(value: Any, path: str, depth: int = 32) -> Any:
    """Return JSON of any shape, nested at most `depth` times, if all strings in it have a UTF-8 form."""
    if isinstance(value, str):
        return text(value, path)
    if isinstance(value, (list, dict)) and not depth:
        raise bad_field(path, "nested too deeply")
    if isinstance(value, list):
        return [checked_json(item, path, depth - 1) for item in value]
    if isinstance(value, dict):
        return {text(name, path): checked_json(item, path, depth - 1) for name, item in value.items()}
    return value


def is_integer(value: Any) -> bool:
    """Return True for a JSON value that is an integer; 3.0 is one, true is not."""
    return is_number(value) and float(value).is_integer()


def is_number(value: Any) -> bool:
    """Return True for a JSON value that is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def shown(value: Any) -> str:
    """Return a value as a message quotes it: in full if it is short."""
    if isinstance(value, (dict, list)):
        return _kind(value)
    written = repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
