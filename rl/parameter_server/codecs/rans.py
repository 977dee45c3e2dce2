"""Entropy coder of small integers: rANS with static frequencies for each of a few groups, in many lanes at a time.

Range asymmetric numeral systems (Duda 2013, arXiv 1311.2540): a state x in [2^16, 2^32) takes a symbol of frequency f
and cumulated frequency c, of 2^14 in all, by x -> (x // f) 2^14 + x mod f + c, and gives 16 bits away before it would
leave its range. Lanes are independent states that advance together, one numpy operation for all; 4 bytes each.
"""

import numpy as np

_BITS = 14  # frequencies of a group add up to 2^14
_TOTAL = 1 << _BITS
_LOW = 1 << 16  # least state
_PER_LANE = 1024  # symbols of a lane at least: its state costs 1/32 of a bit for each
_LANES = 4096


def lanes_of(count: int) -> int:
    """Return the number of lanes for so many symbols."""
    return min(max(count // _PER_LANE, 1), _LANES)


def frequencies(symbols: np.ndarray, groups: np.ndarray, group_count: int) -> np.ndarray:
    """Return the frequencies of symbols in each group, uint16 [groups, alphabet]; each that occurs has 1 or more.

    Args:
        symbols: int64 [n], from 0 on, fewer than 2^13 different ones.
        groups: the group of each symbol, int64 [n].
        group_count: number of groups; one without symbols has all its frequency at 0.
    """
    alphabet = int(symbols.max(initial=0)) + 1
    counts = np.bincount(groups * alphabet + symbols, minlength=group_count * alphabet)
    counts = counts.reshape(group_count, alphabet)
    counts[counts.sum(axis=1) == 0, 0] = 1
    shares = counts * (_TOTAL / counts.sum(axis=1, keepdims=True))
    found = np.maximum(np.rint(shares).astype(np.int64), counts > 0)
    for row in found:  # rounding errors go to the most frequent ones
        while (excess := int(row.sum()) - _TOTAL) != 0:
            at = int(row.argmax())
            row[at] -= np.clip(excess, -_TOTAL, row[at] // 2)
    return found.astype(np.uint16)


def encode(symbols: np.ndarray, groups: np.ndarray, freqs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the last states, uint32 [lanes], and the words given away, uint16, in the order of decoding."""
    lanes = lanes_of(len(symbols))
    flat, cumulated = freqs.astype(np.uint64).reshape(-1), _cumulated(freqs)
    at = (groups * freqs.shape[1] + symbols).astype(np.int64)
    states = np.full(lanes, _LOW, np.uint64)
    words: list[np.ndarray] = []
    for start in reversed(range(0, len(at), lanes)):
        some = at[start : start + lanes]
        f, x = flat[some], states[: len(some)]
        full = x >= f << np.uint64(32 - _BITS)
        words.append(x[full].astype(np.uint16))
        x[full] >>= np.uint64(16)
        whole, rest = np.divmod(x, f)
        x[:] = (whole << np.uint64(_BITS)) + rest + cumulated[some]
    return states.astype(np.uint32), np.concatenate([np.empty(0, np.uint16), *reversed(words)])


def decode(states: np.ndarray, words: np.ndarray, groups: np.ndarray, freqs: np.ndarray) -> np.ndarray:
    """Return the symbols, int64 [n], one for each entry of `groups`.

    Raises:
        ValueError: these are not the states and words of so many symbols.
    """
    if (freqs.sum(axis=1, dtype=np.int64) != _TOTAL).any() or len(states) != lanes_of(len(groups)):
        raise ValueError("the frequencies or the lanes of an entropy coder do not fit")
    alphabet, lanes = freqs.shape[1], len(states)
    flat, cumulated = freqs.astype(np.uint64).reshape(-1), _cumulated(freqs)
    symbol_at = np.concatenate([np.repeat(np.arange(alphabet), row) for row in freqs])  # [groups * 2^14]
    found = np.empty(len(groups), np.int64)
    x, used = states.astype(np.uint64), 0
    for start in range(0, len(groups), lanes):
        group = groups[start : start + lanes]
        own = x[: len(group)]
        slots = own & np.uint64(_TOTAL - 1)
        symbols = found[start : start + lanes] = symbol_at[group * _TOTAL + slots.astype(np.int64)]
        at = group * alphabet + symbols
        own[:] = flat[at] * (own >> np.uint64(_BITS)) + slots - cumulated[at]
        low = own < _LOW
        count = int(np.count_nonzero(low))
        if used + count > len(words):
            raise ValueError("the words of an entropy coder end too early")
        own[low] = (own[low] << np.uint64(16)) | words[used : used + count]
        used += count
    if used != len(words) or (x != _LOW).any():
        raise ValueError("the words of an entropy coder do not end with its symbols")
    return found


def _cumulated(freqs: np.ndarray) -> np.ndarray:
    """Return the sum of the frequencies before each symbol of its group, uint64 [groups * alphabet]."""
    wide = freqs.astype(np.uint64)
    return (np.cumsum(wide, axis=1) - wide).reshape(-1)
