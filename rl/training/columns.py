"""Columns: what travels with each token of a rollout, beside its log-probability, into the rows of an update.

Routing: the update uses the experts that the engine recorded, with the weights that the router gives now. Engine and
trainer otherwise choose experts by scores that differ in their last bits, or by a few updates, and a token whose choice
flips has another log-probability altogether (R3, arXiv 2510.11370). Gradients flow through the weights of the recorded
experts; losses and metrics of the balance are of the recorded choice.

Candidate tokens: tokens are scored among those that the engine drew them from, whatever the policy thinks of others
now. Under top-p, top-k or min-p the sampler's distribution is that of the kept tokens, renormalised. Scored under the
whole one, every importance ratio would be too small by the mass that was dropped; truncated again by a newer policy,
tokens would fall out of their own candidates ("keep sampling mask", DeepSeek-V3.2, arXiv 2512.02556, 3.1).
"""

import abc
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, override

import jax
import numpy as np

from axlearn_like.config import ConfigBase, replace
from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.routing import CHOOSE, PADDING, RoutingLayout
from axlearn_like.training.trainer import resolve_model
from mesh import UserError
from rl.protocol.messages import Rollout, RolloutData


class Place(NamedTuple):
    """A rollout in a row."""

    row: int
    rollout: Rollout
    before: int  # tokens of its prompt but the last, which is the completion's first input
    # Index of these among the row's tokens for prompts; None: an earlier rollout has the same prompt there
    prompt: int | None
    completion: int  # index of the completion among the row's other tokens


class Places(NamedTuple):
    """The rollouts of some rows."""

    prompts: int  # tokens for prompts in front of each row
    targets: tuple[int, ...]  # shape of the rows' targets
    rollouts: Sequence[Place]
    # Int [rows], the tokens of each row behind which padding begins, in rows of one sequence; else None
    lengths: np.ndarray | None = None


def sequence_places(sequences: Sequence[tuple[np.ndarray, Rollout]], rows: int, length: int) -> Places:
    """Return the places of prompts with their completions, a row each, and of empty rows after them."""
    places = [Place(r, own, len(prompt) - 1, 0, len(prompt) - 1) for r, (prompt, own) in enumerate(sequences)]
    lengths = np.zeros(rows, int)
    lengths[: len(places)] = [place.before + len(place.rollout.tokens) for place in places]
    return Places(0, (rows, length), places, lengths)


class TokenColumn(abc.ABC):
    """Base of columns. A new one is a class with these fields and `record`, and a line of the trainer's `columns`."""

    name: str  # key of its array in a batch; `<name>_bytes` is a metric of what came with the rollouts
    shape: tuple[int, ...] = ()  # shape of a token's value
    dtype: Any = np.float32  # type of the array
    empty: float = 0  # value of tokens without a record
    padding: float | None = None  # value behind the end of a sequence that is scored alone; None: `empty`
    # Tokens of prompts have values too, and the array is in the order in which the forward pass gets the tokens, [rows,
    # tokens, ...]; else it is shaped like the targets, with `shape` behind
    with_prompts: bool = False
    # The forward pass reads it, wherever rollouts are scored. Else the objective does, which gets the values of each
    # completion in a row, as it gets the log-probabilities.
    scored: bool = False
    of_any_model: bool = True  # another model's forward pass can read it too, such as a reference's

    @abc.abstractmethod
    def record(self, rollout: Rollout) -> np.ndarray | None:
        """Return what came with a rollout, a value for each token; None: nothing did."""

    def values(self, rollout: Rollout) -> np.ndarray:
        """Return the values [tokens, *shape] of a rollout (UserError: it has no record, or one that does not fit)."""
        if (found := self.record(rollout)) is None:
            raise UserError(f"{_name(rollout)} came without {self.name}; expected a value for each token")
        return found

    def describe(self, targets: tuple[int, ...], prompts: int = 0) -> jax.ShapeDtypeStruct:
        """Return the array of rows with targets of this shape and so many tokens for prompts in front."""
        tokens = (targets[0], prompts + math.prod(targets[1:])) if self.with_prompts else targets
        return jax.ShapeDtypeStruct((*tokens, *self.shape), self.dtype)

    def fill(self, places: Places) -> np.ndarray:
        """Return the array of rows, padded or packed, as `describe` has it."""
        array = np.full(self.describe(places.targets, places.prompts).shape, self.empty, self.dtype)
        front = places.prompts if self.with_prompts else 0
        rows = array.reshape(len(array), front + math.prod(places.targets[1:]), *self.shape)
        if places.lengths is not None and self.padding is not None:
            rows[np.arange(rows.shape[1]) >= places.lengths[:, None]] = self.padding
        for row, rollout, before, prompt, completion in places.rollouts:
            if not len(rollout.tokens) and self.record(rollout) is None:
                continue
            own, at = self.values(rollout), front + completion
            if self.with_prompts:
                if prompt is not None:  # all rollouts of one version have the same
                    rows[row, prompt : prompt + before] = own[:before]
                own = own[before:]
            rows[row, at : at + len(own)] = own
        return array

    def nbytes(self, contents: RolloutData) -> int:
        """Return the bytes that came with these rollouts."""
        records = (self.record(rollout) for _, rollouts in contents.values() for rollout in rollouts.values())
        return sum(0 if record is None else record.nbytes for record in records)


Columns = Sequence[TokenColumn]


class Routing(TokenColumn):
    """The experts that the engine used, in the layers that have some: int16 [rows, tokens of a row, layers, top_k].

    Where there is no record the router chooses.
    """

    name, dtype, empty, padding = "routing", np.int16, CHOOSE, PADDING
    with_prompts, scored, of_any_model = True, True, False

    def __init__(self, layout: RoutingLayout):
        self.shape = layout.shape

    @override
    def record(self, rollout: Rollout) -> np.ndarray | None:
        return rollout.routing

    @override
    def values(self, rollout: Rollout) -> np.ndarray:
        found, (layers, top_k) = rollout.routing, self.shape
        expected = f"the {top_k} experts of each token in {layers} layers, for replay_routing"
        if found is None:
            raise UserError(f"{_name(rollout)} was drawn without a record of its routing; expected {expected}")
        if found.shape[1:] != self.shape:
            raise UserError(f"{_name(rollout)} has a record of routing of shape {found.shape}; expected {expected}")
        return found


class CandidateTokens(TokenColumn):
    """The tokens that each was drawn from: int32, shaped like the targets with `most` behind, -1 where there are fewer.

    A token that was not drawn has none, and is no action.
    """

    name, dtype, empty, scored = "candidate_tokens", np.int32, -1, True

    def __init__(self, most: int):
        """Take the greatest number of them, which is `most` of a `RecordedSampler`."""
        self.shape = (most,)

    @override
    def record(self, rollout: Rollout) -> np.ndarray | None:
        return rollout.candidate_tokens

    @override
    def values(self, rollout: Rollout) -> np.ndarray:
        own, (most,) = rollout.candidate_tokens, self.shape
        if own is None or own.shape[1] > most or len(own) != len(rollout.tokens):
            found = "no record"
            if own is not None:
                found = f"a record of {own.shape[1]}, for {len(own)} of {len(rollout.tokens)},"
            expected = f"the tokens that it was drawn from; expected up to {most} (sampler.most)"
            raise UserError(f"{_name(rollout)} has {found} of {expected}")
        values = np.full((len(own), most), self.empty, self.dtype)
        values[:, : own.shape[1]] = np.where(own == np.iinfo(own.dtype).max, self.empty, own.astype(np.int64))
        return values


def _name(rollout: Rollout) -> str:
    return f"prompt {rollout.prompt_id}, sample {rollout.sample_id}"


def routing_layout(model: ConfigBase) -> RoutingLayout | None:
    """Return what a record of a policy's routing is made of; None: it has no experts."""
    built = build_abstract(model)
    return getattr(built, "routing_layout", None)


def recording(model: ConfigBase) -> ConfigBase:
    """Return the policy with layers that return their routing (ConfigError: it has no experts)."""
    model = resolve_model(model).clone()
    replace(model, MoE.Config, lambda cfg: cfg.set(record_routing=True))
    return model


def to_model(layout: RoutingLayout, record: jax.Array) -> jax.Array:
    """Return the routing of a batch as `Decoder.hidden` takes it: int32 [layers, rows, tokens, top_k]."""
    return layout.expand(record.transpose(2, 0, 1, 3))
