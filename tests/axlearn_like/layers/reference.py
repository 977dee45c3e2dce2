"""The decoder once more, in float64 numpy, head by head and token by token: slow, and obvious.

Parameters are those of the layers (nested dicts, stacked over layers); nothing else is shared with them.
"""

from typing import Any

import numpy as np


def norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    rows = [row / np.sqrt(np.sum(row**2) / len(row) + eps) * scale for row in x.reshape(-1, x.shape[-1])]
    return np.stack(rows).reshape(x.shape)


def rotate(vector: np.ndarray, position: int, frequencies: np.ndarray) -> np.ndarray:
    """One head of one token: the halves are real and imaginary parts of numbers that turn with the position."""
    half = len(vector) // 2
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * frequencies)
    return np.concatenate([turned.real, turned.imag])


def frequencies(width: int, theta: float) -> np.ndarray:
    return np.array([theta ** (-2 * i / width) for i in range(width // 2)])


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def attention(
    p: dict[str, Any], x: np.ndarray, positions: np.ndarray, segments: np.ndarray, *, theta: float, eps: float = 1e-6
) -> np.ndarray:
    """One row: x [length, dim] -> [length, dim]."""
    length, (_, kv_heads, per_kv, width) = len(x), p["q_dkqh"].shape
    freq = frequencies(width, theta)

    def head(weight: np.ndarray, bias: Any, scale: Any) -> np.ndarray:
        y = x @ weight + (0.0 if bias is None else bias)
        return y if scale is None else norm(y, scale, eps)

    def scale(name: str) -> Any:
        return p[name]["scale"] if name in p else None

    out = np.zeros_like(x)
    for k in range(kv_heads):
        bias_k, bias_v = (p[name][k] if name in p else None for name in ("k_bias_kh", "v_bias_kh"))
        keys = head(p["k_dkh"][:, k], bias_k, scale("k_norm"))
        values = head(p["v_dkh"][:, k], bias_v, None)
        keys = np.stack([rotate(keys[t], positions[t], freq) for t in range(length)])
        for q in range(per_kv):
            bias_q = p["q_bias_kqh"][k, q] if "q_bias_kqh" in p else None
            queries = head(p["q_dkqh"][:, k, q], bias_q, scale("q_norm"))
            for t in range(length):
                query = rotate(queries[t], positions[t], freq)
                seen = [s for s in range(t + 1) if segments[s] == segments[t]]
                weights = softmax(np.array([query @ keys[s] for s in seen]) / np.sqrt(width))
                out[t] += weights @ values[seen] @ p["out_kqhd"][k, q]
    return out


def feed_forward(p: dict[str, Any], x: np.ndarray) -> np.ndarray:
    gate = x @ p["gate_df"]
    return (gate / (1 + np.exp(-gate)) * (x @ p["up_df"])) @ p["down_fd"]


def decoder(
    p: dict[str, Any],
    tokens: np.ndarray,
    positions: np.ndarray,
    segments: np.ndarray,
    *,
    theta: float = 10_000.0,
    eps: float = 1e-6,
) -> np.ndarray:
    """One row: tokens [length] -> logits [length, vocab]."""
    x = p["embedding"]["weight_vd"][tokens]
    stacked = p["layers"]
    for index in range(len(stacked["feed_forward"]["gate_df"])):
        layer = pick(stacked, index)
        normed = norm(x, layer["attention_norm"]["scale"], eps)
        x = x + attention(layer["attention"], normed, positions, segments, theta=theta, eps=eps)
        x = x + feed_forward(layer["feed_forward"], norm(x, layer["feed_forward_norm"]["scale"], eps))
    head = p["head"]["weight_dv"] if "head" in p else p["embedding"]["weight_vd"].T
    return norm(x, p["norm"]["scale"], eps) @ head


def pick(tree: dict[str, Any], index: int) -> dict[str, Any]:
    return {key: pick(value, index) if isinstance(value, dict) else value[index] for key, value in tree.items()}


def float64(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: float64(value) for key, value in tree.items()}
    return np.asarray(tree, np.float64)
