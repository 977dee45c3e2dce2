"""Changes by coded pages and coded weights: KL of drawn tokens to the uncoded policy, and greedy tokens that stay.

Prompts are read by one engine; their full pages, coded, go to another, which draws behind them. Coded weights are those
of all matrices. `kl` is that of the policy that draws to the dense one, a drawn token, by the estimate r - 1 - log r.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.layers.base import Params, bind, build_abstract, split
from rl.parameter_server.codecs import get_codec
from rl.protocol.messages import Group, Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.kv_cache.tiers.page_form import Page, PageForm, StoredPage
from rl.rollout.request import Request
from rl.rollout.sampling import Sampler
from rl.rollout.scheduling.page_exports import export_pages, import_pages
from rl.training.logprobs import score_rows
from tests.benches.tiers.policies import CodedPolicy, read_pages
from tests.rl.training.whole_groups import pack_rows
from tools.bench.harness.interleave import Say

BITS = 3.5  # a value, of codecs whose error can be chosen
SAMPLES = 8  # of each problem


def measure(policy: CodedPolicy, say: Say, name: str) -> list[dict[str, Any]]:
    """Return for each codec, on pages and on weights: bits a value, KL, and the share of greedy tokens that stay."""
    greedy = [dataclasses.replace(one, sampler=Sampler.Config(temperature=0.0)) for one in policy.requests]
    drawn = [dataclasses.replace(one, samples=SAMPLES) for one in policy.requests]
    expected = [one.tokens for one in policy.engine.generate(greedy)]
    pages = [
        Page((keys, values))
        for keys, values in zip(*read_pages(policy, policy.engine.generate(policy.requests)), strict=True)
    ]
    chosen = ["ecsq", *(["hevc"] if find_spec("av") is not None else [])]
    ways: list[tuple[str, str, float, Callable[[list[Request]], list[Rollout]]]] = []
    for codec in ("raw", "bf16", "int8", *(f"{one}:{_error(one, pages):.3g}" for one in chosen)):
        ways.append(
            (
                "pages",
                codec,
                _page_bits(pages, codec),
                lambda requests, codec=codec: _over_pages(policy, requests, codec),
            )
        )
    for codec in ("bf16", "int8", "ecsq:0.001", "ecsq:0.01", "ecsq:0.03"):
        coded, bits = _coded_weights(policy.params, codec)
        ways.append(("weights", codec, bits, lambda requests, coded=coded: _engine(policy, coded).generate(requests)))
    found = []
    for of, codec, bits, generate in ways:
        same = [
            _before_first_difference(one.tokens, other) for one, other in zip(generate(greedy), expected, strict=True)
        ]
        row: dict[str, Any] = {"of": of, "codec": codec, "bits": round(bits, 3)}
        row["same_greedy"] = round(sum(one for one, _ in same) / sum(size for _, size in same), 4)
        row["kl"] = float(f"{_kl(policy, drawn, generate(drawn)):.3g}")
        say(f"{name}: {row}")
        found.append(row)
    return found


def _over_pages(policy: CodedPolicy, requests: list[Request], codec: str) -> list[Rollout]:
    """Draw over prompts whose pages another engine has computed, and that were coded on their way."""
    source, target = (_engine(policy, policy.params, tiers=HostTiers.Config(codec=codec)) for _ in range(2))
    source.generate([dataclasses.replace(one, samples=1) for one in requests])
    for request in requests:
        import_pages(target, export_pages(source, request.prompt.tokens))
    drawn = target.generate(requests)
    assert target.stats()["tier_hits_host"] > 0
    return drawn


def _engine(policy: CodedPolicy, params: Params, **changes: Any) -> RolloutEngine:
    engine = policy.engine.cfg.clone(**changes).build()
    engine.set_weights(params, 0)
    return engine


def _page_bits(pages: Sequence[Page], codec: str) -> float:
    """Return the bits a value of pages, each coded for itself."""
    form = PageForm(tuple((array.shape, array.dtype) for array in pages[0].arrays), get_codec(codec))
    stored: list[StoredPage] = [form.pack(page) for page in pages[:: max(1, len(pages) // 4)]]
    return 8 * sum(len(one.blob) for one in stored) / (len(stored) * sum(array.size for array in pages[0].arrays))


def _error(codec: str, pages: Sequence[Page]) -> float:
    """Return the error at which pages take 3.5 bits a value, or the largest one tried if they take more."""
    low, high = math.log(1e-4), math.log(0.3)
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if _page_bits(pages, f"{codec}:{math.exp(middle):.3g}") > BITS else (low, middle)
    return math.exp(high)


def _coded_weights(params: Params, name: str) -> tuple[Params, float]:
    """Return weights whose matrices were coded, and the bits a value of these."""
    codec, nbytes, size = get_codec(name), 0, 0

    def coded(leaf: Any) -> Any:
        nonlocal nbytes, size
        array = np.asarray(leaf)
        if array.ndim < 2:
            return leaf
        blob = codec.encode(array)
        nbytes, size = nbytes + len(blob), size + array.size
        return jnp.asarray(codec.decode(blob, shape=array.shape, dtype=array.dtype))

    made = jax.tree.map(coded, params)
    return made, 8 * nbytes / size


def _kl(policy: CodedPolicy, requests: list[Request], drawn: list[Rollout]) -> float:
    """Return the KL of the policy that drew to the dense one, nats a token."""
    cfg = policy.engine.cfg
    counts = [one.samples for one in requests]
    ends = np.cumsum(counts)
    groups = [
        Group(request.prompt, tuple(drawn[end - count : end]), ())
        for request, end, count in zip(requests, ends, counts, strict=True)
    ]
    rows = pack_rows(groups, max_prompt_tokens=cfg.max_prompt_tokens, max_new_tokens=cfg.max_new_tokens)
    graphdef = split(build_abstract(cfg.model))[0]
    score = jax.jit(lambda params, tokens, targets: score_rows(bind(graphdef, params), tokens, targets, jnp.ones(1)))
    scored = np.asarray(score(policy.params, rows["tokens"], rows["targets"]).logprobs())
    each = [
        scored[index, first : first + len(one.tokens)] - one.logprobs
        for index, (first, one) in enumerate(zip(rows["first"], drawn, strict=True))
    ]
    differences = np.concatenate(each).astype(np.float64)
    return float(np.mean(np.expm1(differences) - differences))


def _before_first_difference(found: np.ndarray, expected: np.ndarray) -> tuple[int, int]:
    """Return the tokens before the first that differs, and those compared: that one too."""
    size = min(len(found), len(expected))
    differs = np.flatnonzero(found[:size] != expected[:size])
    return (int(differs[0]), int(differs[0]) + 1) if len(differs) else (size, size)
