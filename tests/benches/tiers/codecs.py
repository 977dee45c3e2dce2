"""Bits a value against error of each codec, on keys, values and weights of a trained policy; and what errors change.

The policy is the demo's. Keys and values are those of held-out prompts and what is drawn behind them, a row for each
channel of each head and layer, a column for each token. The baseline is RTN: integers of b bits between the least and
the largest of each 128 entries of a row, which are stored as float16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from axlearn_like.config import set_path
from experiments.demo.config import demo
from mesh import make_mesh
from rl.parameter_server.codecs import EcsqCodec, HevcCodec
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.request import Request
from rl.rollout.sampling import Sampler
from rl.rollout.scheduling.page_exports import export_pages, import_pages
from tests.benches.coupled import heldout_requests, trained
from tools.bench.harness.interleave import Say

GROUP = 128
ERRORS = (0.1, 0.03, 0.01, 3e-3, 1e-3)  # mean square over the variance
MAIN = 0.01
MOST = 1 << 18  # entries of a matrix, the first rows of it
Arrays = Sequence[np.ndarray]


def measure(say: Say, *, quick: bool) -> dict[str, Any]:
    """Return the table, `hevc_to_rtn_bits` and `hevc_to_ecsq_bits` on keys, and the tokens that stay the same."""
    with jax.set_mesh(make_mesh()):
        engine, requests = _demo_policy(say, quick=quick)
        matrices = [leaf for leaf in jax.tree.leaves(engine.runner.params) if leaf.ndim >= 2 and leaf.size >= 1 << 14]
        rows = [np.asarray(leaf).astype(np.float32).reshape(-1, leaf.shape[-1]) for leaf in matrices]
        weights = [one[: max(1, MOST // one.shape[1])] for one in rows]
        tensors = {**_cache(engine, requests, say), "weights": weights}
        agreement = _agreement(engine, requests[:48])
    table = {name: _table(arrays, say, name) for name, arrays in tensors.items()}
    main = table["keys"][str(MAIN)]
    ratios = {f"hevc_to_{other}_bits": _ratio(main, other) for other in ("rtn", "ecsq")}
    return {**ratios, "at_error": MAIN, "bits": table, "same_tokens": agreement}


def _demo_policy(say: Say, *, quick: bool) -> tuple[RolloutEngine, list[Request]]:
    """Return an engine with the demo's supervised policy, and held-out problems."""
    cfg = demo(steps=40).set(evaluation=None)
    set_path(cfg, "warm_start.num_steps", 4 if quick else 400)
    experiment, weights = trained(cfg, (0,), say)
    requests = heldout_requests(experiment, 4 if quick else 96, 1)
    engine = experiment.engine_cfg.clone(keep_completions=True, max_num_seqs=len(requests), page_size=8).build()
    engine.set_weights(weights[0], 0)
    return engine, requests


def _ratio(bits: dict[str, float], other: str) -> float | None:
    return round(bits["hevc"] / bits[other], 3) if "hevc" in bits else None


def _cache(engine: RolloutEngine, requests: list[Request], say: Say) -> dict[str, Arrays]:
    """Return keys and values of full pages, float32 [layers * heads * width, tokens] each."""
    pages: list[int] = []
    kv_cache = engine.scheduler.kv_cache
    for request, rollout in zip(requests, engine.generate(requests), strict=True):
        held, _ = kv_cache.hold((engine.version, None), np.concatenate([request.prompt.tokens, rollout.tokens]))
        kv_cache.pool.release(held)
        pages += held
    keys, values = engine.executor.read_pages(pages)()  # [pages, layers, heads, width, tokens]; values: tokens first
    say(f"{len(pages)} pages of keys and values")
    rows = keys.shape[1] * keys.shape[2] * keys.shape[3]
    by_token = values.swapaxes(3, 4)
    return {
        "keys": [np.moveaxis(keys, 0, 3).reshape(rows, -1).astype(np.float32)],
        "values": [np.moveaxis(by_token, 0, 3).reshape(rows, -1).astype(np.float32)],
    }


def _table(arrays: Arrays, say: Say, name: str) -> dict[str, dict[str, float]]:
    """Return bits a value by error: hevc at the coarsest QP that keeps it, the others at the error that hevc has."""
    curve = [_rtn(arrays, bits) for bits in range(1, 9)]
    found = {}
    for error in ERRORS:
        row: dict[str, float] = {"error": error}
        if find_spec("av") is not None:
            row["hevc"], row["error"] = _coded(arrays, HevcCodec(error=error))
        row["ecsq"], _ = _coded(arrays, EcsqCodec(error=row["error"]))
        row["rtn"] = _between(curve, row["error"])
        found[str(error)] = {key: float(f"{value:.4g}") for key, value in row.items()}
        say(f"{name}: {found[str(error)]}")
    return found


def _coded(arrays: Arrays, codec: Any) -> tuple[float, float]:
    """Return bits a value of all arrays together, everything counted, and their error over their variance."""
    nbytes, size, error, variance = 0, 0, 0.0, 0.0
    for array in arrays:
        blob = codec.encode(array)
        back = codec.decode(blob, shape=array.shape, dtype=array.dtype)
        nbytes, size = nbytes + len(blob), size + array.size
        error += float(np.sum((back.astype(np.float64) - array) ** 2))
        variance += float(np.var(array, dtype=np.float64)) * array.size
    return 8 * nbytes / size, error / variance


def _rtn(arrays: Arrays, bits: int) -> tuple[float, float]:
    """Return bits a value, two float16 for each group of a row included, and the error of rounding to nearest."""
    size, groups, error, variance = 0, 0, 0.0, 0.0
    for array in arrays:
        for first in range(0, array.shape[1], GROUP):
            part = array[:, first : first + GROUP].astype(np.float64)
            least = part.min(axis=1, keepdims=True).astype(np.float16).astype(np.float64)
            step = ((part.max(axis=1, keepdims=True) - least) / (2**bits - 1)).astype(np.float16).astype(np.float64)
            codes = np.clip(np.rint((part - least) / np.maximum(step, 1e-12)), 0, 2**bits - 1)
            error += float(np.sum((codes * step + least - part) ** 2))
            size, groups = size + part.size, groups + len(part)
        variance += float(np.var(array, dtype=np.float64)) * array.size
    return bits + 32 * groups / size, error / variance


def _between(curve: Sequence[tuple[float, float]], error: float) -> float:
    """Return the bits of RTN at an error, between whole bits: linear in the logarithm of the error."""
    bits, errors = (np.array(one) for one in zip(*curve, strict=True))
    return float(np.interp(-np.log(error), -np.log(errors), bits))


def _agreement(base: RolloutEngine, requests: list[Request]) -> dict[str, float]:
    """Return the share of greedy tokens, given the same ones before, that stay over prompts whose pages were coded."""
    greedy = [dataclasses.replace(one, sampler=Sampler.Config(temperature=0.0)) for one in requests]
    names = ["raw", "bf16", "int8", "ecsq", *(["hevc"] if find_spec("av") is not None else [])]
    params = base.runner.params
    assert params is not None
    found, expected = {}, None
    for name in names:
        source, target = (base.cfg.clone(tiers=HostTiers.Config(codec=name)).build() for _ in range(2))
        for engine in (source, target):
            engine.set_weights(PlacedWeights(params), 0)
        source.generate(greedy)
        for request in greedy:
            import_pages(target, export_pages(source, request.prompt.tokens))
        tokens = [rollout.tokens for rollout in target.generate(greedy)]
        assert target.stats()["tier_hits_host"] > 0
        expected = tokens if expected is None else expected
        same = [_before_first_difference(a, b) for a, b in zip(tokens, expected, strict=True)]
        found[name] = round(sum(one for one, _ in same) / sum(of for _, of in same), 4)
    return found


def _before_first_difference(found: np.ndarray, expected: np.ndarray) -> tuple[int, int]:
    """Return the tokens before the first that differs, and those compared: that one too."""
    size = min(len(found), len(expected))
    differs = np.flatnonzero(found[:size] != expected[:size])
    return (int(differs[0]), int(differs[0]) + 1) if len(differs) else (size, size)
