"""Attention in float64 numpy, query by query; and small inputs for it."""

from typing import Any, NamedTuple

import numpy as np

from axlearn_like.kernels.attention.interface import ScoreRules


class Inputs(NamedTuple):
    q: np.ndarray  # [b, t, k, q, h]
    k: np.ndarray  # [b, s, k, h]
    v: np.ndarray
    segments: np.ndarray  # [b, t]
    sinks: np.ndarray  # [k, q]


def inputs(*, batch: int, length: int, heads: tuple[int, int], width: int, value_width: int | None = None) -> Inputs:
    """Rows of three documents and some padding, cut at other places in each row."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    ends = np.sort(rng.integers(1, length, (batch, 3)), axis=1)
    segments = 1 + np.sum(np.arange(length)[None, None] >= ends[..., None], axis=1)
    kv, per = heads
    return Inputs(
        normal(batch, length, kv, per, width),
        normal(batch, length, kv, width),
        normal(batch, length, kv, value_width or width),
        np.where(segments == 4, 0, segments).astype(np.int32),
        normal(kv, per),
    )


def attention(x: Inputs, rules: ScoreRules, *, sinks: bool = False) -> np.ndarray:
    """float64 [b, t, k, q, h]."""
    q, k, v = (np.asarray(a, np.float64) for a in (x.q, x.k, x.v))
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    scale = q.shape[-1] ** -0.5 if rules.scale is None else rules.scale
    for place in np.ndindex(*q.shape[:-1]):
        row, t, head, sub = place
        seen = [s for s in range(q.shape[1]) if _sees(rules, t, s) and x.segments[row, s] == x.segments[row, t]]
        scores = k[row, seen, head] @ q[place] * scale
        if rules.soft_cap is not None:
            scores = rules.soft_cap * np.tanh(scores / rules.soft_cap)
        weights = np.exp(scores)
        total = weights.sum() + (np.exp(float(x.sinks[head, sub])) if sinks else 0.0)
        out[place] = weights @ v[row, seen, head] / total
    return out


def _sees(rules: ScoreRules, query: int, key: int) -> bool:
    if not rules.causal:
        return True
    return query - key >= 0 and (rules.window is None or query - key < rules.window)


def gradients(x: Inputs, rules: ScoreRules, weights: np.ndarray, *, sinks: bool = False, count: int = 6) -> list[Any]:
    """Derivatives of sum(attention * weights) by some entries of q, k, v (and sinks), as (array, index, value)."""
    rng, found, step = np.random.default_rng(1), [], 1e-5
    for name in ("q", "k", "v", *(["sinks"] if sinks else [])):
        array = getattr(x, name).astype(np.float64)
        for _ in range(count):
            index = tuple(int(rng.integers(n)) for n in array.shape)

            def value(delta: float, name: str = name, array: np.ndarray = array, index: Any = index) -> float:
                moved = array.copy()
                moved[index] += delta
                return float(np.sum(attention(x._replace(**{name: moved}), rules, sinks=sinks) * weights))

            found.append((name, index, (value(step) - value(-step)) / (2 * step)))
    return found
