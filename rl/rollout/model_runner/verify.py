"""Decoding with drafts: a pure function, to be traced.

A step feeds each row its last token and some drafted ones behind it, draws at all of these places by the keys of their
positions, and keeps draws as long as they are what was drafted, and one more. The tokens, and the places of their sums,
are those of decoding one token at a time (`decode.py`): on CPUs in float32 the results are the same to the bit.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.layers.contexts.cells import Windows, cells_needed
from axlearn_like.layers.contexts.paged import PagedContext, Pool
from axlearn_like.layers.contexts.window import DraftContext
from axlearn_like.training.losses import Chosen
from mesh import constrain
from mesh.cost.expected import turns
from rl.rollout.decoding.drawing import distribution, draw, row_keys
from rl.rollout.decoding.penalties import by_place, with_drawn
from rl.rollout.model_runner.batches import DecodeBatch
from rl.rollout.model_runner.decode import (
    Advance,
    DecodeSettings,
    Step,
    filled,
    first_state,
    outcome,
    paged_step,
    record_of,
)
from rl.rollout.speculation.draft import CONTEXT, NOTHING

_PATIENCE = 8  # steps in which no row accepts a token, after which a dispatch ends: the host may know better drafts


def decode_drafts(
    model: Any,
    pool: Pool,
    windows: Items[Windows],
    batch: DecodeBatch,
    min_alive_rows: jax.Array,
    settings: DecodeSettings,
    *,
    chunk: int,
    plain: bool,
) -> tuple[Pool, Items[Windows], dict[str, jax.Array]]:
    """Draw up to `steps` times of each row, up to `chunk` tokens each time, and at most `batch.remaining` in all.

    Rows without drafts draw one token at a time. Otherwise as `decode`.

    Returns:
        As `decode`, for t = steps * chunk: the pool, the windows, and `tokens` [t, r], `chosen` [t, r], `counts`,
        `stopped`, `broken`, `steps`, `routing` [t, ...]. Of drafts: `drafted` int32 [r], tokens that were verified;
        `accepted` int32 [r], those among the tokens drawn; `missed` int32 [r], steps with a wrong one before the row's
        end, or without a draft.
    """
    steps, pages, room = settings.steps, settings.pages, settings.steps * chunk
    if settings.in_pages:
        cache, advance = pool, paged_step(model, batch, chunk, pages, settings.kernel)
    else:
        furthest = cells_needed(windows[0], batch.lengths + jnp.minimum(batch.remaining, room))
        cache = filled(model, windows, pool, batch, furthest, room, pages)
        advance = _window_step(model, windows[0], chunk)

    def goes_on(state: dict[str, Any]) -> jax.Array:
        return (state["step"] < steps) & (jnp.sum(state["alive"]) >= min_alive_rows) & (state["idle"] < _PATIENCE)

    with turns(steps):
        final = jax.lax.while_loop(
            goes_on, _draft_step(model, batch, advance, room, chunk, plain), _first_state(model, batch, cache, room)
        )
    names = ("tokens", "counts", "stopped", "broken", "drafted", "accepted", "missed")
    return outcome(pool, windows, batch, final, pages, settings.in_pages, names)


def redraw(
    model: Any, pool: Pool, batch: DecodeBatch, settings: DecodeSettings, *, plain: bool
) -> tuple[Pool, dict[str, jax.Array]]:
    """Feed each row its last token and the drafts behind it once, as a prefill does, and draw at all of these places.

    One pass over pages: no windows are filled and no step waits for another, so a token costs less than in
    `decode_drafts`, and as long as most drafts are right, less than in `decode`. There are no tables.

    Args:
        batch: `draft` int32 [r, c - 1], `depth` int32 [r], how many of them each row has; `remaining` is at least one
            more, or 0 in idle rows.
        plain: the sampling parameters of every row are.

    Returns:
        The pool, and the arrays of `decode_drafts` for t = c and one step, but for `accepted` and `missed`.
    """
    size, depth = batch.draft.shape
    chunk, alive = depth + 1, batch.remaining > 0
    offsets, none = jnp.arange(chunk), jnp.zeros(size, jnp.int32)
    live = alive[:, None] & (offsets <= batch.depth[:, None])
    feed = batch.feed[:, None]
    fed = jnp.where(live, jnp.concatenate([feed, batch.draft], axis=1), feed)
    counts = jnp.sum(live, axis=1, dtype=jnp.int32)
    places: Any = batch.page_table, batch.lengths, counts
    context = PagedContext(*places, chunk=chunk, pages=settings.pages, kernel=settings.kernel)
    hidden = model.hidden(fed, context, pool)
    tokens, chosen = _drawer(model, batch, chunk, plain)(hidden.x, None, none)
    _, _, drawn, _, stopped, broken = _verified(tokens, chosen, batch.draft, live, alive, batch.stop)
    out = {
        "tokens": tokens.T,
        "chosen": jax.tree.map(jnp.transpose, chosen),
        "counts": drawn,
        "stopped": stopped,
        "broken": broken,
        "drafted": jnp.where(alive, batch.depth, 0),
        "steps": jnp.int32(1),
    }
    routing = record_of(model, hidden)
    return hidden.cache, out if routing is None else {**out, "routing": routing.transpose(2, 0, 1, 3)}


def _draft_step(model: Any, batch: DecodeBatch, advance: Advance, room: int, chunk: int, plain: bool) -> Step:
    """Return the step from one state of a dispatch to the next: feed each row its drafts, keep the draws that fit."""
    size, depth = batch.feed.shape[0], chunk - 1
    rows, offsets, drawn_tokens = jnp.arange(size)[:, None], jnp.arange(chunk), _drawer(model, batch, chunk, plain)

    def step(state: dict[str, Any]) -> dict[str, Any]:
        alive, counts, lengths = state["alive"], state["counts"], state["lengths"]
        drafts, known = _drafted(batch.draft, state["pointer"], depth)
        wanted = jnp.where(alive, jnp.minimum(known, batch.depth), 0)
        drafted = jnp.clip(batch.remaining - counts - 1, 0, wanted)
        live = alive[:, None] & (offsets <= drafted[:, None])
        feed = state["feed"][:, None]
        fed = jnp.where(live, jnp.concatenate([feed, drafts], axis=1), feed)
        hidden, cache, routing = advance(state["cache"], fed, lengths, live, counts)
        before = by_place(state["seen"], drafts)
        tokens, chosen = drawn_tokens(hidden, before, counts)

        accepted, last, drawn, kept, stopped, broken = _verified(tokens, chosen, drafts, live, alive, batch.stop)
        right = jnp.minimum(accepted, drawn - broken)  # the last of them may have ended the row
        places = jnp.where(kept, counts[:, None] + offsets, room)  # out of range: not written
        recent = jnp.concatenate([state["recent"], tokens], axis=1)
        recent = jnp.take_along_axis(recent, drawn[:, None] + jnp.arange(CONTEXT), axis=1)
        put = partial(_put, places, rows)
        return {
            "step": state["step"] + 1,
            "idle": jnp.where(jnp.any(drawn > 1), 0, state["idle"] + 1),
            "cache": cache,
            "feed": jnp.where(alive, _at(tokens, last), state["feed"]),
            "recent": recent,
            "pointer": _follow(batch.draft, recent, state["pointer"] + drawn),
            "lengths": lengths + drawn,
            "counts": counts + drawn,
            "alive": alive & ~stopped & ~broken & (counts + drawn < batch.remaining),
            "stopped": state["stopped"] | stopped,
            "broken": state["broken"] | broken,
            "seen": None if before is None else with_drawn(state["seen"], rows, tokens, kept),
            "tokens": put(state["tokens"], tokens),
            "chosen": jax.tree.map(put, state["chosen"], chosen),
            "routing": _put_routing(state["routing"], routing, places, rows),
            "kept": None,
            "scores": None,
            "drafted": state["drafted"] + drafted,
            "accepted": state["accepted"] + right,
            "missed": state["missed"] + (alive & ((wanted == 0) | (right < jnp.minimum(drafted, drawn)))),
        }

    return step


def _drawer(
    model: Any, batch: DecodeBatch, chunk: int, plain: bool
) -> Callable[[jax.Array, jax.Array | None, jax.Array], tuple[jax.Array, Chosen]]:
    """Return a function that draws at all places of a step by the keys of their positions: arrays [r, c].

    It gets what the model made of the tokens fed, the counts of tokens before each place if a row needs them, and the
    tokens that each row has drawn in the dispatch, int32 [r].
    """
    size, offsets, keys = batch.feed.shape[0], jnp.arange(chunk), row_keys(batch.identity)
    # Each place is drawn as a row of its own, in arrays of the form that decoding has.
    by_row = batch.sampling, batch.bias, batch.penalties
    sampling, bias, penalties = jax.tree.map(lambda of_row: jnp.repeat(of_row, chunk, axis=0), by_row)

    def drawn_tokens(hidden: jax.Array, before: jax.Array | None, counts: jax.Array) -> tuple[jax.Array, Chosen]:
        logits = constrain(model.logits(hidden), None, None, None).reshape(size * chunk, -1)
        tables: dict[str, Any] = {"counts_rv": before, "bias_rv": bias, "penalties_r2": penalties}
        logits = distribution(logits, sampling, **tables, plain=plain)
        ordinals = batch.ordinals[:, None] + counts[:, None] + offsets
        drawn_with = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, ordinals)
        found = draw(drawn_with.reshape(size * chunk), logits)
        return jax.tree.map(lambda flat: flat.reshape(size, chunk), found)

    return drawn_tokens


def _first_state(model: Any, batch: DecodeBatch, cache: Any, room: int) -> dict[str, Any]:
    """Return what a dispatch begins with; `room`: tokens that each row may draw."""
    none, recent = jnp.zeros(batch.feed.shape[0], jnp.int32), batch.draft[:, :CONTEXT]
    return {
        **first_state(model, batch, cache, room),
        "scores": None,  # none with drafts
        "idle": jnp.int32(0),
        "recent": recent,
        "pointer": _follow(batch.draft, recent, none + CONTEXT),
        "drafted": none,
        "accepted": none,
        "missed": none,
    }


def _verified(
    tokens: jax.Array, chosen: Chosen, drafts: jax.Array, live: jax.Array, alive: jax.Array, stop: jax.Array
) -> tuple[jax.Array, ...]:
    """Compare the tokens drawn [r, c] with the drafted ones [r, c - 1].

    Returns:
        `accepted` int32 [r], drafted tokens that were drawn; `last` int32 [r], the place of the last draw that is kept;
        `drawn` int32 [r], tokens kept; `kept` bool [r, c]; `stopped` bool [r], by a stop token; `broken` bool [r], the
        last log-probability is not a number.
    """
    right = (tokens[:, :-1] == drafts) & live[:, 1:]
    accepted = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)
    not_finite = ~jnp.isfinite(chosen.logit + chosen.total)
    stops = jnp.any(tokens[..., None] == stop[:, None], axis=-1)
    ends = stops | not_finite
    first_end = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1), drafts.shape[1])
    last = jnp.minimum(accepted, first_end)
    drawn = jnp.where(alive, last + 1, 0)
    kept = jnp.arange(tokens.shape[1]) < drawn[:, None]
    stopped, broken = (alive & _at(found, last) for found in (stops, not_finite))
    return accepted, last, drawn, kept, stopped, broken


def _drafted(draft: jax.Array, pointer: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
    """Return the tokens at the pointer, int32 [r, depth], and how many of them there are before the first gap, [r]."""
    at = pointer[:, None] + jnp.arange(depth)
    tokens = jnp.take_along_axis(draft, jnp.minimum(at, draft.shape[1] - 1), axis=1)
    tokens = jnp.where(at < draft.shape[1], tokens, NOTHING)
    return tokens, jnp.sum(jnp.cumprod((tokens >= 0).astype(jnp.int32), axis=1), axis=1)


def _follow(draft: jax.Array, recent: jax.Array, aligned: jax.Array) -> jax.Array:
    """Return the place of each row's draft that goes on from its last tokens, int32 [r]; its end if there is none.

    It is the one with the most of them before it, two at least; or the next place, as if another token had been drawn
    in the place of the last one drafted, if no other has two.
    """
    size, length = draft.shape
    padded = jnp.pad(draft, [(0, 0), (CONTEXT, 0)], constant_values=NOTHING)
    same, matched = jnp.ones((size, length), bool), jnp.zeros((size, length), jnp.int32)
    for back in range(CONTEXT):
        before = padded[:, CONTEXT - 1 - back : CONTEXT - 1 - back + length]
        same &= before == recent[:, CONTEXT - 1 - back, None]
        matched += same
    places = jnp.arange(length)
    score = jnp.where(draft >= 0, 2 * matched + 3 * (places == aligned[:, None]), 0)
    best = jnp.max(score, axis=1, keepdims=True)
    place = jnp.min(jnp.where(score == best, places, length), axis=1)
    return jnp.where(best[:, 0] >= 3, place, length)


def _at(values_rc: jax.Array, place_r: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values_rc, place_r[:, None], axis=1)[:, 0]


def _window_step(model: Any, windows: Windows, chunk: int) -> Advance:
    def advance(
        caches: Any, fed: jax.Array, lengths: jax.Array, live: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        # The entry of a token that is not kept is behind the row's last token: it is written over before it is
        # seen.
        needed = cells_needed(windows, lengths + jnp.sum(live, axis=1))
        hidden = model.hidden(fed, DraftContext(lengths, needed, counts, live, chunk), caches)
        return hidden.x, hidden.cache, record_of(model, hidden)

    return advance


def _put(places: jax.Array, rows: jax.Array, record: jax.Array, new: jax.Array) -> jax.Array:
    return record.at[places, rows].set(new, mode="drop")


def _put_routing(routing: Any, new: Any, places: jax.Array, rows: jax.Array) -> Any:
    """Return the record [t, layers, r, top_k] with that of the fed tokens [layers, r, c, top_k] at their places."""
    if routing is None:
        return None
    return routing.at[places, :, rows].set(new.transpose(1, 2, 0, 3), mode="drop")
