"""Batches of a dispatch: sequences packed into arrays, one sequence a row."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.contexts.paged import NULL_PAGE
from rl.rollout.decoding.penalties import count_tokens
from rl.rollout.decoding.scores import mode_number
from rl.rollout.model_runner.tiles import Tiles
from rl.rollout.sampling import NEVER, Sampler, SamplingMetadata, pack_bias, pack_metadata, uses_tables
from rl.rollout.sequence import Sequence
from rl.rollout.speculation.speculator import Drafts

MANY = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """Rows of a prefill: `counts[i]` tokens of a sequence that has `starts[i]` in the pool. int32."""

    tokens: Any  # [r, c]
    starts: Any  # [r]
    counts: Any  # [r]; 0: an idle row
    page_table: Any  # [r, w]
    adapters: Any = None  # [r], slots; None: the engine has no bank
    targets: Any = None  # [r, c], the token behind each one, to be scored; None: none is


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """Rows of a decoding dispatch. int32 unless said otherwise."""

    feed: Any  # [r], the last token, whose keys and values are not in the pool yet
    lengths: Any  # [r], tokens in the pool
    ordinals: Any  # [r], position in the completion of the first token to draw
    remaining: Any  # [r], tokens that may be drawn; 0: an idle row
    identity: Any  # uint32 [r, 4]: seed, high and low half of the prompt's id, sample id
    stop: Any  # [r, m], stop tokens, -1 where there are fewer
    page_table: Any  # [r, w], with room for the tokens to be drawn
    sampling: SamplingMetadata  # temperature, top-k and so on of each row
    # [r, length], tokens that the row may go on with; None: the dispatch has no drafts (see verify.py)
    draft: Any = None
    depth: Any = None  # [r], drafted tokens that a step verifies; None likewise
    bias: Any = None  # float32 [r, vocab], added to logits; None, as the next three: no row needs tables
    seen: Any = None  # [r, vocab], tokens so far (see `count_tokens`)
    penalties: Any = None  # float32 [r, 2], of presence and of frequency
    scoring: Any = None  # [r], the scores that are recorded (see scores.py)
    adapters: Any = None  # [r], slots, or None where the engine has no bank
    # [tiles], blocks of keys that the rows of a tile have in common; None: each row reads its own (tiles.py)
    shared: Any = None
    sources: Any = None  # [tiles], the row whose pages hold them; None likewise


def pack_prefill(
    chosen: Items[tuple[Sequence, int]],
    rows: int,
    chunk: int,
    pages: int,
    *,
    adapters: bool = False,
    scored: bool = False,
) -> PrefillBatch:
    """Pack each sequence's next `count` tokens; `pages`: of a row; `adapters`: with slots; `scored`: with targets."""
    batch = PrefillBatch(
        tokens=np.zeros((rows, chunk), np.int32),
        starts=np.zeros(rows, np.int32),
        counts=np.zeros(rows, np.int32),
        page_table=np.full((rows, pages), NULL_PAGE, np.int32),
        adapters=_slots(enumerate(sequence for sequence, _ in chosen), rows) if adapters else None,
        targets=np.zeros((rows, chunk), np.int32) if scored else None,
    )
    for row, (sequence, count) in enumerate(chosen):
        batch.tokens[row, :count] = sequence.tokens[sequence.cached : sequence.cached + count]
        if scored:
            batch.targets[row, :count] = sequence.tokens[sequence.cached + 1 : sequence.cached + count + 1]
        batch.starts[row], batch.counts[row] = sequence.cached, count
        used = sequence.pages[:pages]
        batch.page_table[row, : len(used)] = used
    return batch


@dataclasses.dataclass(frozen=True)
class DecodeLayout:
    """Sizes and optional arrays of a batch of decoding."""

    pages: int  # entries of a row of the page table
    vocab: int  # tokens of the model
    adapters: bool = False  # the rows have slots of adapters
    tables: bool | None = None  # arrays of the vocabulary are there; None: if a sampler needs them
    stops: int = 0  # columns of stop tokens, at least
    most_each: int = MANY  # tokens that each row may draw, at most


def pack_decode(
    sequences: Items[Sequence | None],
    samplers: Items[Sampler.Config],
    layout: DecodeLayout,
    *,
    drafts: Drafts | None = None,
    room: Items[int] | None = None,
    tiles: Tiles | None = None,
) -> DecodeBatch:
    """Pack the sequences, one for each of the first samplers; the other rows, and those of None, are idle.

    Args:
        samplers: sampling parameters of all rows.
        room: tokens that each sequence may draw with drafts, at most.
        tiles: in which the sequences stand.
    """
    size, pages, vocab = len(samplers), layout.pages, layout.vocab
    present = [(row, sequence) for row, sequence in enumerate(sequences) if sequence is not None]
    needed = max((stop_columns(len(sequence.group.stop.tokens)) for _, sequence in present), default=stop_columns(0))
    columns = np.zeros((4, size), np.int32)
    tables = any(map(uses_tables, samplers)) if layout.tables is None else layout.tables
    tabled = _tables(present, samplers, vocab) if tables else {}
    batch = DecodeBatch(
        feed=columns[0],
        lengths=columns[1],
        ordinals=columns[2],
        remaining=columns[3],
        identity=np.zeros((size, 4), np.uint32),
        stop=np.full((size, max(layout.stops, needed)), -1, np.int32),
        page_table=np.full((size, pages), NULL_PAGE, np.int32),
        sampling=pack_metadata(samplers, vocab),
        draft=None if drafts is None else drafts.tokens,
        depth=None if drafts is None else drafts.depths,
        **tabled,
        adapters=_slots(present, size) if layout.adapters else None,
        shared=None if tiles is None else tiles.shared,
        sources=None if tiles is None else tiles.sources,
    )
    for row, sequence in present:
        request = sequence.group.request
        number = request.prompt.id
        free, most = sequence.constraints.free, min(sequence.remaining, layout.most_each)
        most = most if free else sequence.constraints.at_once(sequence.drawn, most)
        most = most if room is None else min(most, room[row])
        columns[:, row] = sequence.tokens[-1], sequence.cached, sequence.drawn, most
        batch.identity[row] = request.seed & 0xFFFFFFFF, number >> 32, number & 0xFFFFFFFF, sequence.sample
        batch.stop[row, : len(sequence.group.stop.tokens)] = sequence.group.stop.tokens
        batch.page_table[row, : len(sequence.pages)] = sequence.pages[:pages]
    return batch


def stop_columns(count: int) -> int:
    """Return the columns of a batch for so many stop tokens, a power of two."""
    return max(4, 1 << max(0, count - 1).bit_length())


def _slots(present: Iterable[tuple[int, Sequence]], size: int) -> np.ndarray:
    """Return the slot of each row's adapter; 0, the base, for idle rows."""
    slots = np.zeros(size, np.int32)
    for row, sequence in present:
        slots[row] = sequence.group.slot
    return slots


def _tables(present: Items[tuple[int, Sequence]], samplers: Items[Sampler.Config], vocab: int) -> dict[str, np.ndarray]:
    """Return the arrays of a batch by which rows have biases, penalties and scores."""
    bias, seen = pack_bias(samplers, vocab), np.zeros((len(samplers), vocab), np.int32)
    scoring = np.zeros(len(samplers), np.int32)
    for row, sequence in present:
        scoring[row] = mode_number(sequence.group.request.scores)
        sequence.constraints.ban(bias[row], sequence.drawn, NEVER)
        if uses_tables(samplers[row]):
            count_tokens(seen[row], sequence.tokens, len(sequence.prompt))
    penalties = np.array([(one.presence_penalty, one.frequency_penalty) for one in samplers], np.float32)
    return {"bias": bias, "seen": seen, "penalties": penalties, "scoring": scoring}
