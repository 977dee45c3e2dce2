"""The executor: packs sequences into batches, and lets every process of an engine run them in the same order."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.contexts.paged import NULL_PAGE
from rl.rollout.kv_cache.manager import PageCopy
from rl.rollout.kv_cache.tiers.page_form import Page, stack_pages
from rl.rollout.model_runner.batches import MANY, pack_decode, pack_prefill
from rl.rollout.model_runner.dispatches import compilations, compile_page_programs, run_idle
from rl.rollout.model_runner.processes.calls import RunnerCall
from rl.rollout.model_runner.processes.remote_runners import RemoteRunners
from rl.rollout.model_runner.runner import COPIES, LEAST_COPIES, ModelRunner
from rl.rollout.model_runner.shapes.buckets import bucket, halvings
from rl.rollout.model_runner.shapes.listed import Kind, ReadyPrograms, Rules, Shape, listed_programs, rules_of
from rl.rollout.model_runner.tiles import Tiles
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.sampling import Sampler, uses_tables
from rl.rollout.sequence import Sequence
from rl.rollout.speculation.earlier import Redraw
from rl.rollout.speculation.speculator import Drafts

BESIDE_MASKS = 4  # tokens that others draw while a grammar waits for the host, which sees one token after the other


class Executor:
    """The calls of the model runners of all processes of an engine: this one's, and the remote runners'.

    Attributes:
        ready: the compiled programs that dispatches keep to; None: each takes what fits it best, and may compile it.
    """

    def __init__(self, runner: ModelRunner, remote_runners: RemoteRunners | None = None):
        """`remote_runners`: the other processes; None: the engine is this one alone."""
        self.runner, self.buckets, self._remote_runners = runner, runner.buckets, remote_runners
        self.ready: ReadyPrograms | None = None

    @property
    def alone(self) -> bool:
        """True if the engine has no other process."""
        return self._remote_runners is None

    @property
    def leaving(self) -> bool:
        """True if another process of the engine was asked to end."""
        return self._remote_runners is not None and self._remote_runners.leaving()

    def close(self) -> None:
        """Let the other processes end their loops; no call follows."""
        if self._remote_runners is not None:
            self._remote_runners.close()

    def install(self, placed: PlacedWeights) -> None:
        """Switch to placed weights."""
        self._order("install", key=placed.key)
        self.runner.install(placed.params)

    def order_place(self, key: int) -> None:
        """Let the others place the weights that they have pulled under this key; the caller does the same here."""
        self._order("place", key=key)

    def sleep(self) -> None:
        """Give back the memory of weights and pages."""
        self._run("sleep")

    def copy(self, copies: Items[PageCopy]) -> None:
        """Copy pages, in order; all reads of a batch come before its writes."""
        for first in range(0, len(copies), COPIES):
            part = list(copies[first : first + COPIES])
            part += [(NULL_PAGE, NULL_PAGE)] * (bucket(len(part), halvings(COPIES, LEAST_COPIES)) - len(part))
            sources, targets = np.array(part, np.int32).T
            self._run("copy", sources, targets)

    def zero(self, pages: Items[int]) -> None:
        """Fill pages with zeros."""
        for first in range(0, len(pages), COPIES):
            targets = np.full(COPIES, NULL_PAGE, np.int32)
            part = pages[first : first + COPIES]
            targets[: len(part)] = part
            self._run("zero", targets)

    def read_pages(self, pages: Items[int]) -> Callable[[], list[np.ndarray]]:
        """Start copying pages to the host, before whatever is written next.

        The result waits for the copies, in any thread, and returns those of each array of the pool [n, layers, ...].
        """
        parts = [self.runner.read(self._padded(pages[at : at + COPIES])) for at in range(0, len(pages), COPIES)]

        def finish() -> list[np.ndarray]:
            arrays = zip(*(jax.device_get(part) for part in parts), strict=True)
            return [np.concatenate(one)[: len(pages)] for one in arrays]

        return finish

    def write_pages(self, pages: Items[int], contents: Items[Page]) -> None:
        """Write pages that were read, here or by another engine."""
        for at in range(0, len(pages), COPIES):
            targets = self._padded(pages[at : at + COPIES])
            self.runner.write(targets, stack_pages(contents[at : at + COPIES], len(targets)))

    def settle(self) -> None:
        """Wait until the device has done all that was dispatched."""
        jax.block_until_ready(self.runner.cache.pool)

    def _padded(self, pages: Items[int]) -> np.ndarray:
        targets = np.full(bucket(len(pages), halvings(COPIES, LEAST_COPIES)), NULL_PAGE, np.int32)
        targets[: len(pages)] = pages
        return targets

    def compilations(self) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
        """Keep to a short list of programs from now on (shapes/listed.py); returns functions that compile them.

        Those of the first list are called before the first request, in any threads, and need no weights. They fit every
        request. Those of the second may be called beside the engine's use, or before it.
        """
        runner = self.runner
        ready = self.ready = ReadyPrograms(listed_programs(runner.buckets, runner.cfg))

        def compile_one(shape: Shape, compile_it: Callable[[], None]) -> None:
            compile_it()
            ready.add(shape)

        pairs = zip(ready.listed, compilations(runner, ready.listed), strict=True)
        found = [partial(compile_one, *pair) for pair in pairs]
        return [*found[: ready.NEEDED], partial(compile_page_programs, runner)], found[ready.NEEDED :]

    def run_idle(self) -> None:
        """Call the programs of `compilations` that are compiled, with weights in place and before the first request."""
        if (ready := self.ready) is not None:
            ready.refresh()
            run_idle(self.runner, ready.compiled)

    def prefill_room(self, unfilled: int) -> tuple[int, int]:
        """Return (most rows, chunk) of the dispatch for a sequence that has so many tokens to prefill."""
        return self.buckets.prefill(unfilled) if self.ready is None else self.ready.prefill_room(unfilled)

    def prefill(self, chosen: Items[tuple[Sequence, int]]) -> tuple[Any, Any]:
        """Put the next `count` tokens of each sequence into the pool; returns their routing and scores, or None."""
        tokens, keys = max(count for _, count in chosen), max(one.cached + count for one, count in chosen)
        scored = chosen[0][0].to_score
        kind: Kind = "score" if scored else "prefill"
        _, chunk = self.buckets.prefill(tokens)
        rows = 1 if scored else self.buckets.prefill_rows(len(chosen), chunk)
        shape = Shape(kind, rows, chunk, self.buckets.width(keys))
        if self.ready is not None:
            found = self.ready.find(Shape(kind, len(chosen), tokens, keys))
            assert found is not None, f"`prefill_room` chose sequences for a program that is ready, not {shape}"
            shape = found
        pages, adapters = shape.keys // self.runner.page_size, self.runner.bank is not None
        batch = pack_prefill(chosen, shape.rows, shape.tokens, pages, adapters=adapters, scored=scored)
        return self._run("prefill", batch)

    def decoding(self, sequences: Items[Sequence], *, with_drafts: bool = False) -> Shape | None:
        """Return the program that draws for these sequences; None: there is none with drafts."""
        bound, count = [one for one in sequences if not one.constraints.free], len(sequences)
        tables = any(one.constraints.needs_tables(one.drawn) for one in bound)
        rules = Rules.TABLES if tables else rules_of(one.group.sampler for one in sequences)
        if with_drafts and any(one.group.request.scores or one.constraints.masked for one in bound):
            return None
        if self.ready is not None:
            return self.ready.find(Shape("verify" if with_drafts else "decode", count, rules=rules))
        rows = self.buckets.rows(count, with_drafts=with_drafts)
        return Shape("verify" if with_drafts else "decode", rows, rules=rules)

    def decode(
        self,
        sequences: Items[Sequence | None],
        *,
        waiting: bool,
        drafts: Drafts | None = None,
        room: Items[int] | None = None,
        tiles: Tiles | None = None,
    ) -> dict[str, jax.Array]:
        """Start drawing; returns the arrays of `decode.decode`, or those of `verify.decode_drafts`.

        Args:
            sequences: best the longest first.
            waiting: other sequences could use a row that becomes free.
            room: tokens that each sequence has pages for, with drafts.
            tiles: in which the sequences are arranged, with None for idle rows; None: in none.
        """
        present, with_drafts = [one for one in sequences if one is not None], drafts is not None
        shape = self.decoding(present, with_drafts=with_drafts)
        assert shape is not None, "drafts are made for a program that is there"
        ready = None if self.ready is None else self.ready.rows(shape.kind, shape.rules)
        masked = sum(one.constraints.masked for one in present)  # masked rows leave after a token, the others soon
        min_alive_rows = self.buckets.min_alive_rows(
            len(present) - masked, waiting=waiting, with_drafts=with_drafts, sizes=ready
        )
        samplers = [Sampler.Config() if one is None else one.group.sampler for one in sequences]
        samplers += [Sampler.Config()] * (shape.rows - len(sequences))
        layout = self.runner.decode_layout(
            tables=shape.rules is Rules.TABLES,
            stops=0 if self.ready is None else self.runner.listed_stops,
            most_each=BESIDE_MASKS if masked else MANY,
        )
        batch = pack_decode(sequences, samplers, layout, drafts=drafts, room=room, tiles=tiles)
        chunk = {} if drafts is None else {"chunk": drafts.chunk}
        return self._run("decode", batch, min_alive_rows=min_alive_rows, plain=shape.rules is Rules.PLAIN, **chunk)

    def redrawing(self, sequence: Sequence) -> bool:
        """Return True if a pass over drafts draws as decoding does: without tables, and to the same bits."""
        ruled = uses_tables(sequence.group.sampler) or not sequence.constraints.free
        return self.runner.redraws and self.ready is None and not ruled

    def redraw(self, redraw: Redraw) -> dict[str, jax.Array]:
        """Start verifying earlier rollouts in one pass; returns the arrays of `verify.redraw`."""
        (rows, chunk), present = redraw.shape, len(redraw.sequences)
        tokens, depths = np.zeros((rows, chunk - 1), np.int32), np.zeros(rows, np.int32)
        for row, draft in enumerate(redraw.drafts):
            tokens[row, : len(draft)], depths[row] = draft, len(draft)
        keys = max(one.cached + 1 + len(draft) for one, draft in zip(redraw.sequences, redraw.drafts, strict=True))
        pages = self.buckets.width(keys) // self.runner.page_size
        samplers = [one.group.sampler for one in redraw.sequences] + [Sampler.Config()] * (rows - present)
        layout = self.runner.decode_layout(pages=pages, tables=False)
        batch = pack_decode(redraw.sequences, samplers, layout, drafts=Drafts(tokens, depths, chunk))
        return self._run("redraw", batch, plain=rules_of(samplers) is Rules.PLAIN)

    def _run(self, name: str, *arguments: Any, **options: int) -> Any:
        self._order(name, *arguments, **options)
        return getattr(self.runner, name)(*arguments, **options)

    def _order(self, name: str, *arguments: Any, **options: int | None) -> None:
        if self._remote_runners is not None:
            self._remote_runners.send(RunnerCall(name, arguments, options))
