"""Prefill of a chunk, decoding of some steps, copies of pages: pure functions, to be traced."""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.layers.contexts.blocks import KEY_BLOCK
from axlearn_like.layers.contexts.cascade import CascadeContext, CascadePagedContext, fill_tiles
from axlearn_like.layers.contexts.cells import Windows, cells_needed, fill
from axlearn_like.layers.contexts.int8_cache import empty_tokens
from axlearn_like.layers.contexts.latents import has_latents, write_latents
from axlearn_like.layers.contexts.paged import NULL_PAGE, PagedContext, Pool, token_places, write_places
from axlearn_like.layers.contexts.paged_decode import PagedDecodeContext
from axlearn_like.layers.contexts.window import Cache, WindowContext
from axlearn_like.layers.moe.routing import RoutingLayout
from axlearn_like.layers.wrappers.columns import cut_columns
from axlearn_like.training.losses import Chosen
from mesh import constrain
from mesh.cost.expected import turns
from mesh.programs.shared import unknown_indices
from rl.rollout.decoding.drawing import distribution, draw, keep_most, row_keys
from rl.rollout.decoding.penalties import with_drawn
from rl.rollout.decoding.scores import Scores, drawn_scores, empty_scores, prompt_scores
from rl.rollout.model_runner.batches import DecodeBatch, PrefillBatch

# (cache, tokens fed, lengths, what is alive, step or count) -> (hidden, cache, routing)
Advance = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any, Any]]
Step = Callable[[dict[str, Any]], dict[str, Any]]


def prefill(
    model: Any, pool: Pool, batch: PrefillBatch, *, pages: int, kernel: PagedKernel | None
) -> tuple[Pool, tuple[Any, Scores | None]]:
    """Write keys and values of the batch's tokens into their pages.

    Returns:
        The pool, the experts of the tokens [layers with experts, r, c, top_k] if the model records them, and the scores
        of the batch's targets [r, c], if it has some.
    """
    context = PagedContext(
        batch.page_table, batch.starts, batch.counts, chunk=batch.tokens.shape[1], pages=pages, kernel=kernel
    )
    hidden = model.hidden(batch.tokens, context, pool)
    scores = None if batch.targets is None else prompt_scores(model, hidden.x, batch.targets)
    return hidden.cache, (record_of(model, hidden), scores)


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """Settings of decoding that all dispatches of an engine share."""

    steps: int  # tokens that each row draws, at most; with drafts, times that it draws
    pages: int  # pages of a layer in the pool
    kernel: PagedKernel | None  # kernel of attention, for TPUs; None: XLA
    in_pages: bool  # decoding reads the pages themselves, and not windows
    candidates: int | None = None  # tokens that each is drawn from, recorded; None: they are not recorded


def decode(
    model: Any,
    pool: Pool,
    windows: Items[Windows],
    batch: DecodeBatch,
    min_alive_rows: jax.Array,
    settings: DecodeSettings,
    *,
    plain: bool,
) -> tuple[Pool, Items[Windows], dict[str, jax.Array]]:
    """Draw up to `steps` tokens of each row.

    Ends early when fewer than `min_alive_rows` rows are left (1 or more, so at the latest when all have stopped).

    `windows`, by layer, are memory to work in; their contents do not matter. The kernel needs none, and nor does XLA
    where it decodes from the pages themselves (`in_pages`). The batch has the longest rows first, so that short ones do
    not share a group with long ones.

    Returns:
        The pool, the windows, and `tokens` int32 [steps, r], `chosen` (the parts of their log-probabilities)
        [steps, r], `counts` int32 [r] (tokens drawn), `stopped` bool [r] (by a stop token), `broken` bool [r] (the last
        log-probability is not a number), `steps`; and, if the model records it, `routing` [steps, layers with experts,
        r, top_k], the experts of the token that was fed at each step; with `candidates`, `kept` int32 [steps, r,
        candidates], the tokens that each was drawn from (`keep_most`); `scores` [steps, r] where the batch has tables.
    """
    head, steps, pages, candidates = model, settings.steps, settings.pages, settings.candidates
    if settings.in_pages:
        cache, advance = pool, paged_step(model, batch, 1, pages, settings.kernel)
    else:
        own: Any = windows[0]
        own = own if batch.shared is None else [tile.own for tile in own]
        needed = cells_needed(own, batch.lengths + jnp.minimum(batch.remaining, steps))
        if batch.adapters is None:
            model, head = cut_columns(model, batch.feed.shape[0])
        cache = filled(model, windows, pool, batch, needed, steps, pages)
        advance = _window_step(model, needed, batch.shared)
    with turns(steps):  # loop in which no row stops
        final = jax.lax.while_loop(
            lambda state: (state["step"] < steps) & (jnp.sum(state["alive"]) >= min_alive_rows),
            _token_step(head, batch, advance, plain, candidates),
            first_state(model, batch, cache, steps, candidates),
        )
    return outcome(pool, windows, batch, final, pages, settings.in_pages, ("tokens", "counts", "stopped", "broken"))


def _token_step(head: Any, batch: DecodeBatch, advance: Advance, plain: bool, candidates: int | None) -> Step:
    """Return the step from one state of a dispatch to the next: feed each row its last token, draw one more."""
    keys, rows, write = row_keys(batch.identity), jnp.arange(batch.feed.shape[0]), jax.lax.dynamic_update_index_in_dim

    def step(state: dict[str, Any]) -> dict[str, Any]:
        now, alive, counts = state["step"], state["alive"], state["seen"]
        hidden, cache, routing = advance(state["cache"], state["feed"], state["lengths"], alive, now)
        raw = constrain(head.logits(hidden)[:, 0], None, None)
        tables: dict[str, Any] = {"counts_rv": counts, "bias_rv": batch.bias, "penalties_r2": batch.penalties}
        logits = distribution(raw, batch.sampling, **tables, plain=plain)
        kept = None
        if candidates is not None:
            logits, kept = keep_most(logits, candidates)
        tokens, chosen = draw(jax.vmap(jax.random.fold_in)(keys, batch.ordinals + now), logits)
        broken = alive & ~jnp.isfinite(chosen.logit + chosen.total)
        stopped = alive & jnp.any(tokens[:, None] == batch.stop, axis=-1)
        drawn = state["counts"] + alive
        scores = None if batch.scoring is None else drawn_scores(batch.scoring, raw, logits, tokens)

        def recorded(all_: jax.Array, one: jax.Array) -> jax.Array:
            return write(all_, one, now, 0)

        return {
            "step": now + 1,
            "cache": cache,
            "feed": jnp.where(alive, tokens, state["feed"]),
            "lengths": state["lengths"] + alive,
            "counts": drawn,
            "alive": alive & ~stopped & ~broken & (drawn < batch.remaining),
            "stopped": state["stopped"] | stopped,
            "broken": state["broken"] | broken,
            "seen": None if counts is None else with_drawn(counts, rows, tokens, alive),
            "tokens": recorded(state["tokens"], tokens),
            "chosen": jax.tree.map(recorded, state["chosen"], chosen),
            "routing": None if routing is None else recorded(state["routing"], routing[:, :, 0]),
            "kept": None if kept is None else recorded(state["kept"], kept),
            "scores": jax.tree.map(recorded, state["scores"], scores),
        }

    return step


def outcome(
    pool: Pool,
    windows: Items[Windows],
    batch: DecodeBatch,
    final: dict[str, Any],
    pages: int,
    in_pages: bool,
    names: Items[str],
) -> tuple[Pool, Items[Windows], dict[str, jax.Array]]:
    """Return the pool with the tokens of a dispatch, its windows, and the parts of its last state of these names.

    Log-probabilities (`chosen`), `steps` and what was recorded (`routing`, `kept`, `scores`) are always among them.
    """
    if in_pages:
        pool = final["cache"]
    else:
        pool = write_back(pool, final["cache"], batch, final["counts"], pages)
        windows = tuple(cache.windows for cache in final["cache"])
    recorded = [name for name in ("routing", "kept", "scores") if final.get(name) is not None]
    out = {name: final[name] for name in (*names, "chosen", *recorded)}
    return pool, windows, {**out, "steps": final["step"]}


def first_state(
    model: Any, batch: DecodeBatch, cache: Any, steps: int, candidates: int | None = None
) -> dict[str, Any]:
    """Return what a dispatch begins with; `steps`: tokens that each row may draw."""
    size = batch.feed.shape[0]
    return {
        "step": jnp.int32(0),
        "cache": cache,
        "feed": batch.feed,
        "lengths": batch.lengths,
        "counts": jnp.zeros(size, jnp.int32),
        "alive": batch.remaining > 0,
        "stopped": jnp.zeros(size, bool),
        "broken": jnp.zeros(size, bool),
        "seen": batch.seen,
        "tokens": jnp.zeros((steps, size), jnp.int32),
        "chosen": Chosen(*[jnp.ones((steps, size), jnp.float32)] * 3),
        "routing": empty_record(model, steps, size),
        "kept": None if candidates is None else jnp.full((steps, size, candidates), -1, jnp.int32),
        "scores": None if batch.scoring is None else empty_scores(steps, size, vocab=model.vocab_size),
    }


def copy_pages(pool: Pool, sources: jax.Array, targets: jax.Array, *, layers: int, pages: int) -> Pool:
    """Copy pages in all layers; int32 [n] each. Targets are distinct, except for the null page (padding)."""
    offsets = jnp.arange(layers)[:, None] * pages
    return jax.tree.map(lambda x: x.at[targets + offsets].set(x[sources + offsets]), pool)


def zero_pages(pool: Pool, targets: jax.Array, *, layers: int, pages: int) -> Pool:
    """Fill pages with zeros in all layers: a NaN there would spoil the next sequence, although masked."""
    offsets = jnp.arange(layers)[:, None] * pages
    return jax.tree.map(lambda x: x.at[targets + offsets].set(0), pool)


def record_of(model: Any, hidden: Any) -> jax.Array | None:
    """Return the routing of a forward pass as it is recorded, complete on every device."""
    if hidden.aux.routing is None:
        return None
    return constrain(model.routing_layout.compact(hidden.aux.routing), None, None, None, None)


def empty_record(model: Any, steps: int, size: int) -> jax.Array | None:
    """Return room for the routing of `steps` tokens of each row; None if the model records none."""
    layout: RoutingLayout | None = getattr(model, "routing_layout", None)
    if layout is None or not layout.recorded:
        return None
    layers, top_k = layout.shape
    return constrain(jnp.zeros((steps, layers, size, top_k), layout.dtype), None, None, None, None)


def paged_step(model: Any, batch: DecodeBatch, chunk: int, pages: int, kernel: PagedKernel | None) -> Advance:
    """Return the forward pass of a step on the pages: of a token of each row, [r], or of several, [r, chunk]."""

    def advance(
        pool: Pool, fed: jax.Array, lengths: jax.Array, live: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Pool, Any]:
        counts = live.astype(jnp.int32) if live.ndim == 1 else jnp.sum(live, axis=1, dtype=jnp.int32)
        context = paged_context(batch, lengths, counts, chunk=chunk, pages=pages, kernel=kernel)
        hidden = model.hidden(fed[:, None] if fed.ndim == 1 else fed, context, pool)
        return hidden.x, hidden.cache, record_of(model, hidden)

    return advance


def paged_context(
    batch: DecodeBatch, lengths: jax.Array, counts: jax.Array, *, chunk: int, pages: int, kernel: PagedKernel | None
) -> PagedContext:
    """Return the context of a step on the pages: by the kernel for TPUs, or by XLA, which is None.

    Args:
        lengths: int32 [r], tokens of each row in the pool.
        counts: int32 [r], tokens that are fed now.
        chunk: the most of them.
        pages: pages of one layer.
    """
    places: Any = batch.page_table, lengths, counts
    sizes: dict[str, Any] = {"chunk": chunk, "pages": pages}
    if batch.shared is not None:
        tile = -(-len(lengths) // len(batch.shared))
        sizes |= {"shared": batch.shared * KEY_BLOCK, "sources": batch.sources, "tile": tile}
    if kernel is None:
        return PagedDecodeContext(*places, **sizes)
    kind = PagedContext if batch.shared is None else CascadePagedContext
    return kind(*places, **sizes, kernel=kernel)


def _window_step(model: Any, needed: jax.Array, shared: jax.Array | None = None) -> Advance:
    def advance(
        caches: Any, feed: jax.Array, lengths: jax.Array, alive: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        # A row that has ended writes behind its last token in its own window, which nothing reads.
        common = lengths, needed, step, alive[:, None]
        context = WindowContext(*common) if shared is None else CascadeContext(*common, shared)
        hidden = model.hidden(feed[:, None], context, caches)
        return hidden.x, hidden.cache, record_of(model, hidden)

    return advance


def filled(
    model: Any, windows: Items[Windows], pool: Pool, batch: DecodeBatch, needed: jax.Array, steps: int, pages: int
) -> tuple[Cache, ...]:
    """Return each layer's windows, filled from the pool, with room for the tokens of this dispatch."""
    size = batch.feed.shape[0]
    if has_latents(pool):
        width = pool["latent"].shape[-1]
        fresh = constrain(jnp.zeros((steps, size, width), pool["latent"].dtype), None, None, None), None
        expands = [layer.attention.window_keys for layer in model.blocks()]
    else:
        empty = empty_tokens(pool, steps, size)
        fresh, expands = (empty, empty), [None] * len(windows)

    tables = [batch.page_table + index * pages for index in unknown_indices(len(windows))]
    found: Any = windows  # windows of rows, or of tiles of rows
    if batch.shared is None:
        full: Any = fill(found, pool, tables, batch.lengths, needed, expands)
    else:
        full = fill_tiles(found, pool, tables, batch.lengths, needed, batch.shared, batch.sources)
    return tuple(Cache(window, *fresh) for window in full)


def write_back(pool: Pool, caches: Items[Cache], batch: DecodeBatch, counts: jax.Array, pages: int) -> Pool:
    """Write the tokens of this dispatch into their pages: those of all layers at once, each layer's steps in turn.

    Tokens stay in the order of steps in which they were recorded: to turn a copy of them would take longer than the
    copy; their places are few numbers.
    """
    steps = jnp.arange(len(jax.tree.leaves(caches[0].k)[0]))
    page, slot = token_places(pool, batch.page_table, batch.lengths[:, None] + steps, steps < counts[:, None])
    layers = jnp.arange(len(caches))[:, None, None] * pages
    page = jnp.where(page.T == NULL_PAGE, NULL_PAGE, page.T + layers).reshape(-1, page.shape[0])
    slot = jnp.tile(slot.T, (len(caches), 1))

    def joined(*of_layers: jax.Array) -> jax.Array:
        return jnp.concatenate(of_layers)

    k = jax.tree.map(joined, *(cache.k for cache in caches))
    if has_latents(pool):
        return write_latents(pool, k, page, slot)
    return write_places(pool, k, jax.tree.map(joined, *(cache.v for cache in caches)), page, slot)
