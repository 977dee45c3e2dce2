"""Steps between two arrays of 16-bit words: two bits a word, for changes too many to be listed one by one.

    code 0: one less, 1: unchanged, 2: one more, 3: any other word, an *exception*, listed in full

After an update most changed bfloat16 values are the next ones of their format, so their words differ by one. Codes are
found and applied by whole vectors, whatever has changed; only exceptions are looked for one by one.
"""

from collections.abc import Iterator

import numpy as np

_AT_ONCE = 1 << 19  # words at a time: temporaries stay in cache; a multiple of 32
_UNCHANGED = 0x55  # the byte of four unchanged words
# Gathers four codes, each in a word of 16 bits, in the byte above bit 48.
_GATHER = np.uint64((1 << 48) + (1 << 34) + (1 << 20) + (1 << 6))


def _steps_of_bytes() -> np.ndarray:
    """Return for each byte what it adds to its four words, uint64 [256]: 0 for an exception."""
    codes = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3
    steps = np.where(codes == 3, 0, codes - 1).astype(np.int16)
    return np.ascontiguousarray(steps).view(np.uint64).reshape(256)


_STEPS = _steps_of_bytes()


def length_of(words: int) -> int:
    """Return the bytes of the codes of so many words: four words a byte, in multiples of eight bytes."""
    return -(-words // 32) * 8


def changed_share(new: np.ndarray, old: np.ndarray, samples: int = 64, width: int = 1024) -> float:
    """Return which share of the words differs, estimated from some of them, always the same."""
    starts = np.linspace(0, max(new.size - width, 0), samples).astype(np.int64)
    return float(np.mean([np.mean(new[at : at + width] != old[at : at + width]) for at in starts]))


def find_steps(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return the codes that turn `old` into `new`, both uint16 [words]; uint8 [length_of(words)]."""
    codes = np.empty(length_of(new.size), np.uint8)
    steps, gathered = np.empty(_AT_ONCE, np.uint16), np.empty(_AT_ONCE // 4, np.uint64)
    for first in range(0, new.size, _AT_ONCE):
        some = new[first : first + _AT_ONCE]
        room = codes[first // 4 : (first + _AT_ONCE) // 4]
        step, four = steps[: 4 * len(room)], gathered[: len(room)]
        step[len(some) :] = 1
        np.subtract(some, old[first : first + _AT_ONCE], out=step[: len(some)])
        step[: len(some)] += np.uint16(1)  # modulo 2^16
        np.minimum(step, 3, out=step)
        np.multiply(step.view(np.uint64), _GATHER, out=four)
        four >>= np.uint64(48)
        room[:] = four
    return codes


def find_exceptions(codes: np.ndarray, words: int) -> np.ndarray:
    """Return the indices of the exceptions, in a fixed order.

    Raises:
        IndexError: one lies behind the last word.
    """
    found = [np.empty(0, np.int64)]
    for first in range(0, words, _AT_ONCE):
        found.append(_exceptions(codes[first // 4 : (first + _AT_ONCE) // 4]) + first)
    where = np.concatenate(found)
    if len(where) and where.max() >= words:
        raise IndexError(f"an exception behind the last of {words} words")
    return where


def apply_steps(codes: np.ndarray, old: np.ndarray, exceptions: np.ndarray, out: np.ndarray) -> Iterator[np.ndarray]:
    """Write into `out` what the codes turn `old` into; yield each part of it as soon as it is complete.

    Args:
        codes: uint8 [length_of(words)].
        old: the words before, uint16 [words].
        exceptions: words of the exceptions, in the order of `find_exceptions`.
        out: uint16 [words].

    Raises:
        ValueError: there are more or fewer exceptions than the codes say. IndexError: one lies behind the last word.
    """
    steps, taken = np.empty(_AT_ONCE // 4, np.uint64), 0
    for first in range(0, len(old), _AT_ONCE):
        some, part = codes[first // 4 : (first + _AT_ONCE) // 4], out[first : first + _AT_ONCE]
        step = steps[: len(some)]
        np.take(_STEPS, some, out=step, mode="clip")  # which needs no buffer
        np.add(old[first : first + _AT_ONCE], step.view(np.uint16)[: len(part)], out=part)
        where = _exceptions(some)
        given = exceptions[taken : taken + len(where)]
        part[where] = given  # ValueError: there are fewer
        taken += len(where)
        yield part
    if taken != len(exceptions):
        raise ValueError(f"{len(exceptions)} exceptions for {taken} codes")


def _exceptions(codes: np.ndarray) -> np.ndarray:
    """Return the indices of the exceptions among the words of some codes, whose bytes are a multiple of eight."""
    marks = codes & (codes >> 1)
    marks &= _UNCHANGED
    blocks = np.flatnonzero(marks.view(np.uint64) != 0)
    inside = marks.view(np.uint64)[blocks].view(np.uint8)
    places = np.flatnonzero(inside != 0)
    words = 4 * (8 * blocks[places >> 3] + (places & 7))
    marked = inside[places]
    return np.concatenate([words[(marked >> 2 * lane & 1).view(bool)] + lane for lane in range(4)])
