"""Batches of a dispatch: sequences packed into arrays, one sequence a row."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.contexts.paged import NULL_PAGE
from rl.rollout.model_runner.tiles import Tiles
from rl.rollout.sampling import Sampler, SamplingMetadata, pack_bias, pack_metadata
from rl.rollout.sequence import Sequence
from rl.rollout.speculation.speculator import Drafts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """Rows of a prefill: `counts[i]` tokens of a sequence that has `starts[i]` in the pool. int32."""

    tokens: Any  # [r, c]
    starts: Any  # [r]
    counts: Any  # [r]; 0: an idle row
    page_table: Any  # [r, w]
    adapters: Any = None  # [r], slots; None: the engine has no bank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """Rows of a decoding dispatch. int32 unless said otherwise.

    Attributes:
        feed: [r], the last token, whose keys and values are not in the pool yet.
        lengths: [r], tokens in the pool.
        ordinals: [r], position in the completion of the first token to draw.
        remaining: [r], tokens that may be drawn; 0: an idle row.
        identity: uint32 [r, 4]: seed, high and low half of the prompt's id, sample id.
        stop: [r, m], stop tokens, -1 where there are fewer.
        page_table: [r, w], with room for the tokens to be drawn.
        sampling: temperature, top-k and so on of each row.
        draft: [r, length], tokens that the row may go on with; None: the dispatch has no drafts (see verify.py).
        depth: [r], drafted tokens that a step verifies; None likewise.
        bias: float32 [r, vocab] or None. seen: bool [r, vocab] or None.
        adapters: [r], slots, or None where the engine has no bank.
        shared: [tiles], blocks of keys that the rows of a tile have in common; None: each row reads its own (tiles.py).
        sources: [tiles], the row whose pages hold them; None likewise.
    """

    feed: Any
    lengths: Any
    ordinals: Any
    remaining: Any
    identity: Any
    stop: Any
    page_table: Any
    sampling: SamplingMetadata
    draft: Any = None
    depth: Any = None
    bias: Any = None
    seen: Any = None
    adapters: Any = None
    shared: Any = None
    sources: Any = None


def pack_prefill(
    chosen: Items[tuple[Sequence, int]], rows: int, chunk: int, pages: int, *, adapters: bool = False
) -> PrefillBatch:
    """Pack the next `count` tokens of each sequence; `pages`: of a row; `adapters`: with the rows' slots."""
    batch = PrefillBatch(
        tokens=np.zeros((rows, chunk), np.int32),
        starts=np.zeros(rows, np.int32),
        counts=np.zeros(rows, np.int32),
        page_table=np.full((rows, pages), NULL_PAGE, np.int32),
        adapters=_slots(enumerate(sequence for sequence, _ in chosen), rows) if adapters else None,
    )
    for row, (sequence, count) in enumerate(chosen):
        batch.tokens[row, :count] = sequence.tokens[sequence.cached : sequence.cached + count]
        batch.starts[row], batch.counts[row] = sequence.cached, count
        used = sequence.pages[:pages]
        batch.page_table[row, : len(used)] = used
    return batch


def pack_decode(
    sequences: Items[Sequence | None],
    samplers: Items[Sampler.Config],
    *,
    pages: int,
    vocab: int,
    adapters: bool = False,
    drafts: Drafts | None = None,
    room: Items[int] | None = None,
    tiles: Tiles | None = None,
    tables: bool = False,
    stops: int = 0,
) -> DecodeBatch:
    """Pack the sequences, one for each of the first samplers; the other rows, and those of None, are idle.

    Args:
        sequences: sequences of the first rows.
        samplers: sampling parameters of all rows.
        pages: entries of a row of the page table.
        vocab: tokens of the model.
        adapters: the rows have slots of adapters.
        drafts: drafted tokens of all rows.
        room: tokens that each sequence may draw with drafts, at most.
        tiles: in which the sequences stand.
        tables: `bias` and `seen` are there even if no row needs them, as in a program that was compiled ahead.
        stops: columns of stop tokens, at least.
    """
    size = len(samplers)
    present = [(row, sequence) for row, sequence in enumerate(sequences) if sequence is not None]
    needed = max((stop_columns(len(sequence.group.stop.tokens)) for _, sequence in present), default=stop_columns(0))
    columns = np.zeros((4, size), np.int32)
    bias, seen = pack_bias(samplers, vocab), _seen(present, samplers, vocab)
    batch = DecodeBatch(
        feed=columns[0],
        lengths=columns[1],
        ordinals=columns[2],
        remaining=columns[3],
        identity=np.zeros((size, 4), np.uint32),
        stop=np.full((size, max(stops, needed)), -1, np.int32),
        page_table=np.full((size, pages), NULL_PAGE, np.int32),
        sampling=pack_metadata(samplers, vocab),
        draft=None if drafts is None else drafts.tokens,
        depth=None if drafts is None else drafts.depths,
        bias=np.zeros((size, vocab), np.float32) if tables and bias is None else bias,
        seen=np.zeros((size, vocab), bool) if tables and seen is None else seen,
        adapters=_slots(present, size) if adapters else None,
        shared=None if tiles is None else tiles.shared,
        sources=None if tiles is None else tiles.sources,
    )
    for row, sequence in present:
        request = sequence.group.request
        number = request.prompt.id
        columns[:, row] = sequence.tokens[-1], sequence.cached, sequence.drawn, sequence.remaining
        if room is not None:
            batch.remaining[row] = min(sequence.remaining, room[row])
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


def _seen(present: Items[tuple[int, Sequence]], samplers: Items[Sampler.Config], vocab: int) -> np.ndarray | None:
    """Return bool [rows, vocab], tokens so far; None if no row has a repetition penalty."""
    if all(sampler.repetition_penalty == 1 for sampler in samplers):
        return None
    seen = np.zeros((len(samplers), vocab), bool)
    for row, sequence in present:
        seen[row, sequence.tokens] = True
    return seen
