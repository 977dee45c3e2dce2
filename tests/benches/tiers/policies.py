"""Policies whose tensors are coded: the demo's after supervision, and a larger one of random weights; all its tensors.

Rows of keys and values are channels, of each head and layer, and their columns tokens: those of held-out prompts and
of what is drawn behind them. Gradients are those of the mean log-probability of what was drawn, weighted at random as
by advantages. Moments are Adam's after some of such updates, each of other rollouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axlearn_like.config import set_path
from axlearn_like.layers.base import Params, bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.training.losses import token_logprobs
from experiments.demo.config import demo
from models.tiny import tiny
from rl.protocol.messages import Group, Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from tests.benches.coupled import heldout_requests, trained
from tests.rl.training.whole_groups import pack_rows
from tools.bench.harness.interleave import Say

MOST = 1 << 16  # entries of a kind, the first rows of each of its matrices
UPDATES = 8  # of Adam
Arrays = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class CodedPolicy:
    """A policy with the problems that it answers."""

    engine: RolloutEngine
    requests: list[Request]
    params: Params

    def __post_init__(self) -> None:
        self.engine.set_weights(self.params, 0)


def policies(say: Say, *, quick: bool) -> dict[str, CodedPolicy]:
    """Return the policies by name. The larger one has 19 M parameters, and answers the same problems."""
    cfg = demo(steps=40).set(evaluation=None)
    set_path(cfg, "warm_start.num_steps", 4 if quick else 400)
    experiment, weights = trained(cfg, (0,), say)
    requests = heldout_requests(experiment, 4 if quick else 32, 1)
    base = experiment.engine_cfg.clone(keep_completions=True, max_num_seqs=len(requests), page_size=16)
    sizes = {"dim": 64, "num_layers": 2} if quick else {"dim": 512, "num_layers": 6, "num_heads": 8, "hidden": 1536}
    model = tiny(vocab_size=experiment.tokenizer.vocab_size, num_kv_heads=2 if quick else 4, head_dim=64, **sizes)
    larger = split(model.build(rngs=nnx.Rngs(0)))[1]
    return {
        "demo": CodedPolicy(base.build(), requests, weights[0]),
        "larger": CodedPolicy(base.clone(model=model).build(), requests, larger),
    }


def tensors(policy: CodedPolicy, say: Say) -> dict[str, Arrays]:
    """Return its tensors by kind, float32 matrices, about 2^16 entries in all."""
    drawn = policy.engine.generate(policy.requests)
    matrices = {**_cache(policy, drawn), "weights": _matrices(policy.params)}
    say("activations, gradients and moments")
    rows = _rows(policy, drawn)
    graphdef, params = split(build_abstract(policy.engine.cfg.model))[0], policy.params
    matrices["activations"] = _activations(policy, rows)
    gradient = jax.jit(jax.grad(lambda params, weights: _loss(graphdef, params, rows, weights)))
    adam = optax.scale_by_adam(b2=0.98)
    state: Any = adam.init(params)
    for number in range(UPDATES):
        weights = np.random.default_rng(number).normal(size=(len(rows["tokens"]), 1)) * rows["drawn"]
        found = gradient(params, jnp.asarray(weights, jnp.float32))
        _, state = adam.update(found, state)
    return {
        **matrices,
        "gradients": _matrices(found),
        "first moments": _matrices(state.mu),
        "second moments": _matrices(state.nu),
    }


def _cache(policy: CodedPolicy, drawn: Sequence[Rollout]) -> dict[str, Arrays]:
    """Return keys and values of full pages, float32 [layers * heads * width, tokens] each."""
    keys, values = read_pages(policy, drawn)  # [pages, layers, heads, width, tokens]; values: tokens first
    rows = keys.shape[1] * keys.shape[2] * keys.shape[3]
    by_token = values.swapaxes(3, 4)
    both = [np.moveaxis(one, 0, 3).reshape(rows, -1).astype(np.float32) for one in (keys, by_token)]
    tokens = max(256, MOST // rows)  # of all layers: keys of the first one are those of a token wherever it stands
    return {name: [one[:, :tokens]] for name, one in zip(("keys", "values"), both, strict=True)}


def read_pages(policy: CodedPolicy, drawn: Sequence[Rollout]) -> list[np.ndarray]:
    """Return keys and values of the full pages of what was just drawn."""
    pages: list[int] = []
    kv_cache = policy.engine.scheduler.kv_cache
    for request, rollout in zip(policy.requests, drawn, strict=True):
        tokens = np.concatenate([request.prompt.tokens, rollout.tokens])
        held, _ = kv_cache.hold((policy.engine.version, None), tokens)
        kv_cache.pool.release(held)
        pages += held
    return list(policy.engine.executor.read_pages(sorted(set(pages)))())  # beginnings are shared: each once


def _rows(policy: CodedPolicy, drawn: Sequence[Rollout]) -> dict[str, Any]:
    """Return rows of what was drawn, and which targets were: float32 [rows, length]."""
    cfg = policy.engine.cfg
    pairs = list(zip(policy.requests, drawn, strict=True))
    groups = [Group(request.prompt, (rollout,), ()) for request, rollout in pairs]
    rows = pack_rows(groups, max_prompt_tokens=cfg.max_prompt_tokens, max_new_tokens=cfg.max_new_tokens)
    mask = np.zeros(rows["tokens"].shape, np.float32)
    for index, (first, (_, rollout)) in enumerate(zip(rows["first"], pairs, strict=True)):
        mask[index, first : first + len(rollout.tokens)] = 1.0
    return {**rows, "drawn": mask}


def _activations(policy: CodedPolicy, rows: Mapping[str, Any]) -> Arrays:
    """Return the hidden states behind the last block, a row for each token that is no padding."""
    graphdef = split(build_abstract(policy.engine.cfg.model))[0]
    states = jax.jit(lambda params: bind(graphdef, params).hidden(rows["tokens"], _context(rows["tokens"])).x)
    real = np.cumsum(rows["drawn"][:, ::-1], axis=1)[:, ::-1] > 0
    return _matrices({"hidden": np.asarray(states(policy.params))[real]})


def _loss(graphdef: Any, params: Params, rows: Mapping[str, Any], weights: jax.Array) -> jax.Array:
    model = bind(graphdef, params)
    logits = model(rows["tokens"], _context(rows["tokens"]))
    return -jnp.mean(token_logprobs(logits, rows["targets"]) * weights)


def _context(tokens: np.ndarray) -> PackedContext:
    return PackedContext(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.ones(tokens.shape, int))


def _matrices(tree: Any) -> Arrays:
    """Return the first rows of all large leaves: last axes are columns."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim >= 2 and leaf.size >= 1 << 14]
    return [_first(np.asarray(leaf).reshape(-1, leaf.shape[-1]), len(leaves)).astype(np.float32) for leaf in leaves]


def _first(matrix: np.ndarray, of: int = 1) -> np.ndarray:
    return matrix[: max(1, MOST // of // matrix.shape[1])]
