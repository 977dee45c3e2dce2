"""Replay of what the engine recorded with the tokens: the experts that it used, and the tokens that it drew from.

Routing replay: the update uses the experts that the engine recorded, with the weights that the router gives now.

Engine and trainer otherwise choose experts by scores that differ in their last bits, or by a few updates, and a token
whose choice flips has another log-probability altogether (R3, arXiv 2510.11370). Gradients flow through the weights of
the recorded experts; losses and metrics of the balance are of the recorded choice.

In a batch the record is int16 [rows, tokens of a row, layers with experts, top_k], in the order in which the policy's
forward pass gets the tokens; where there is none the router chooses.

Support replay: tokens are scored among those that the engine drew them from, whatever the policy thinks of others now.
Under top-p, top-k or min-p the sampler's distribution is that of the kept tokens, renormalised. Scored under the whole
one, every importance ratio would be too small by the mass that was dropped; truncated again by a newer policy, tokens
would fall out of their own support ("keep sampling mask", DeepSeek-V3.2, arXiv 2512.02556, 3.1). In a batch the record
is int32 [..., tokens, most], -1 where there are fewer; a token that was not drawn has none, and is no action.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.config import ConfigBase, replace
from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.routing import CHOOSE, PADDING, RoutingLayout
from axlearn_like.training.trainer import resolve_model
from mesh import UserError
from rl.protocol.messages import Rollout, RolloutData
from rl.training.packing import Row

DTYPE = np.int16


def routing_layout(model: ConfigBase) -> RoutingLayout | None:
    """Return what a record of a policy's routing is made of; None: it has no experts."""
    built = build_abstract(model)
    return getattr(built, "routing_layout", None)


def recording(model: ConfigBase) -> ConfigBase:
    """Return the policy with layers that return their routing (ConfigError: it has no experts)."""
    model = resolve_model(model).clone()
    replace(model, MoE.Config, lambda cfg: cfg.set(record_routing=True))
    return model


def describe_routing(layout: RoutingLayout, rows: int, tokens: int) -> jax.ShapeDtypeStruct:
    """Return the record of so many rows."""
    return jax.ShapeDtypeStruct((rows, tokens, *layout.shape), DTYPE)


def replay_padded(
    rows: Sequence[Row], contents: RolloutData, layout: RoutingLayout, sizes: tuple[int, int, int]
) -> np.ndarray:
    """Return the record of rows in the layout of `GroupContext`; `sizes`: max_prompt_tokens, max_new_tokens, samples.

    The prompt's is that of the row's first rollout: all of one version have the same.
    """
    prefix, length, samples = sizes[0] - 1, sizes[1], sizes[2]
    record = _empty(layout, len(rows), prefix + samples * length)
    for r, row in enumerate(rows):
        for g, rollouts in row:
            prompt, found = contents[g]
            for i, n in enumerate(rollouts):
                own = _of(found[n], layout)
                if not i:
                    _put(record[r], 0, own[: len(prompt) - 1])
                _put(record[r], prefix + i * length, own[len(prompt) - 1 :])
    return record


def replay_packed(
    rows: Sequence[Row], contents: RolloutData, layout: RoutingLayout, first: np.ndarray, prompts: int, length: int
) -> np.ndarray:
    """Return the record of rows in the layout of `PackedGroupContext`, `first` being where completions begin."""
    record = _empty(layout, len(rows), prompts + length)
    for r, row in enumerate(rows):
        front = index = 0
        for g, rollouts in row:
            prompt, found = contents[g]
            for n in rollouts:
                own = _of(found[n], layout)
                if n == rollouts[0]:
                    _put(record[r], front, own[: len(prompt) - 1])
                _put(record[r], prompts + int(first[r, index]), own[len(prompt) - 1 :])
                index += 1
            front += len(prompt) - 1
    return record


def replay_rows(
    sequences: Sequence[tuple[np.ndarray, Rollout]], layout: RoutingLayout, rows: int, length: int
) -> np.ndarray:
    """Return the record of prompts with their completions, a row each, and of empty rows after them."""
    record = np.full((rows, length, *layout.shape), PADDING, DTYPE)
    for r, (prompt, rollout) in enumerate(sequences):
        record[r, : len(prompt) + len(rollout.tokens) - 1] = CHOOSE
        _put(record[r], 0, _of(rollout, layout))
    return record


def routing_bytes(contents: RolloutData) -> int:
    """Return the bytes of the records that came with these rollouts."""
    rollouts = (rollout for _, found in contents.values() for rollout in found.values())
    return sum(0 if rollout.routing is None else rollout.routing.nbytes for rollout in rollouts)


def to_model(layout: RoutingLayout, record: jax.Array) -> jax.Array:
    """Return the record of a batch as `Decoder.hidden` takes it: int32 [layers, rows, tokens, top_k]."""
    return layout.expand(record.transpose(2, 0, 1, 3))


def _empty(layout: RoutingLayout, rows: int, tokens: int) -> np.ndarray:
    return np.full((rows, tokens, *layout.shape), CHOOSE, DTYPE)


def _put(record: np.ndarray, at: int, own: np.ndarray) -> None:
    record[at : at + len(own)] = own


def _of(rollout: Rollout, layout: RoutingLayout) -> np.ndarray:
    """Return a rollout's record.

    Raises:
        UserError: it has none, or that of another policy.
    """
    name, (layers, top_k) = f"prompt {rollout.prompt_id}, sample {rollout.sample_id}", layout.shape
    expected = f"the {top_k} experts of each token in {layers} layers, for replay_routing"
    if rollout.routing is None:
        if not len(rollout.tokens):
            return np.zeros((0, *layout.shape), layout.dtype)
        raise UserError(f"{name} was drawn without a record of its routing; expected {expected}")
    if rollout.routing.shape[1:] != layout.shape:
        raise UserError(f"{name} has a record of routing of shape {rollout.routing.shape}; expected {expected}")
    return rollout.routing


def describe_support(most: int, *tokens: int) -> jax.ShapeDtypeStruct:
    """Return the record of an array of tokens."""
    return jax.ShapeDtypeStruct((*tokens, most), jnp.int32)


def support_padded(rows: Sequence[Row], contents: RolloutData, most: int, samples: int, length: int) -> np.ndarray:
    """Return the record of padded rows, [rows, samples, length, most]."""
    record = _no_support(most, len(rows), samples, length)
    for r, row in enumerate(rows):
        for g, rollouts in row:
            for i, n in enumerate(rollouts):
                _put_support(record[r, i], 0, contents[g][1][n])
    return record


def support_packed(rows: Sequence[Row], contents: RolloutData, most: int, first: np.ndarray, length: int) -> np.ndarray:
    """Return the record of packed rows, [rows, length, most]; `first`: where completions begin."""
    record = _no_support(most, len(rows), length)
    for r, row in enumerate(rows):
        placed = [contents[g][1][n] for g, rollouts in row for n in rollouts]
        for at, rollout in zip(first[r], placed, strict=False):
            _put_support(record[r], int(at), rollout)
    return record


def support_rows(sequences: Sequence[tuple[np.ndarray, Rollout]], most: int, rows: int, length: int) -> np.ndarray:
    """Return the record of prompts with their completions, a row each, [rows, length, most]."""
    record = _no_support(most, rows, length)
    for r, (prompt, rollout) in enumerate(sequences):
        _put_support(record[r], len(prompt) - 1, rollout)
    return record


def support_bytes(contents: RolloutData) -> int:
    """Return the bytes of the records that came with these rollouts."""
    rollouts = (rollout for _, found in contents.values() for rollout in found.values())
    return sum(0 if rollout.support is None else rollout.support.nbytes for rollout in rollouts)


def _no_support(most: int, *tokens: int) -> np.ndarray:
    return np.full((*tokens, most), -1, np.int32)


def _put_support(record: np.ndarray, at: int, rollout: Rollout) -> None:
    """Write a rollout's record.

    Raises:
        UserError: it has none, or one of another sampler.
    """
    if not len(rollout.tokens):
        return
    name, most = f"prompt {rollout.prompt_id}, sample {rollout.sample_id}", record.shape[-1]
    own = rollout.support
    if own is None or own.shape[1] > most or len(own) != len(rollout.tokens):
        found = "no record" if own is None else f"a record of {own.shape[1]}, for {len(own)} of {len(rollout.tokens)},"
        raise UserError(
            f"{name} has {found} of the tokens that it was drawn from; expected up to {most} (sampler.most)"
        )
    known = np.where(own == np.iinfo(own.dtype).max, -1, own.astype(np.int64))
    record[at : at + len(own), : own.shape[1]] = known
