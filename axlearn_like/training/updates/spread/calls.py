"""The rows of experts during one update: sent to the members that compute them, and back.

A call is a part's rows of one expert, with zeros up to the next power of two: so its shapes, and all of its bits,
depend on the batch alone, not on the member that computes it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from axlearn_like.elastic.experts import LEAST_ROWS, Key
from axlearn_like.elastic.member import Message
from axlearn_like.elastic.parts import Node, fold, nodes
from axlearn_like.training.updates.spread.cut import flat, zeros_of
from axlearn_like.training.updates.zebra.stages import ExpertStages, SentRows

_NOTHING: Any = object()  # sum of no parts

Exchange = Callable[[str, Sequence[Message]], list[Message]]  # (kind, message to each member) -> that of each


class PartRows(NamedTuple):
    """Arrays of a part that its experts need, in host memory."""

    x: np.ndarray  # [rows, length, dim]
    weights: np.ndarray  # float32 [rows, length, top_k]
    experts: np.ndarray  # int32 [rows, length, top_k]; the number of experts: padding


class _Call(NamedTuple):
    part: int
    expert: int
    places: np.ndarray  # int [rows], token * top_k + choice


class _Kept(NamedTuple):
    """A computed call, for its backward pass."""

    sent: SentRows
    rows: int


class ExpertCalls:
    """The calls of one update, of which this member makes some for itself and others, layer by layer.

    Attributes:
        grads: sums of the gradients of this member's experts, by nodes of the tree over the parts.
        counts: int64 [layers, experts], rows of this member's parts.
    """

    def __init__(
        self,
        stages: ExpertStages,
        exchange: Exchange,
        targets: np.ndarray,
        params: Mapping[Key, Any],
        place: tuple[int, int],
    ):
        """Take the programs, the exchange with others, and who computes what.

        Args:
            stages: programs of one expert.
            exchange: sends a message to each member, and returns that of each.
            targets: int [layers, experts, parts], `ExpertMap.calls`.
            params: matrices of the experts that this member has, [1, 1, ...].
            place: place of this member, and the number of members.
        """
        self._stages, self._exchange, self._targets, self._params = stages, exchange, targets, params
        self._me, self._members = place
        self._lists: dict[int, list[list[_Call]]] = {}  # layer -> calls of this member's parts, by who makes them
        self._asked: dict[int, list[list[Any]]] = {}  # layer -> calls of others' parts that this member makes
        self._kept: dict[tuple[int, int, int], _Kept] = {}
        self.grads: dict[Key, dict[Node, Any]] = {}
        self.counts = np.zeros(targets.shape[:2], np.int64)

    def forward(self, layer: int, sent: Mapping[int, PartRows]) -> dict[int, np.ndarray]:
        """Return the sum of each token's experts, for each of this member's parts: [rows, length, dim]."""
        lists: list[list[_Call]] = [[] for _ in range(self._members)]
        for part, rows in sent.items():
            for call in _calls(part, rows.experts.reshape(-1), self.counts[layer]):
                lists[self._targets[layer, call.expert, part]].append(call)
        self._lists[layer] = lists

        def message(calls: list[_Call]) -> Message:
            header = {"calls": [(call.part, call.expert, len(call.places)) for call in calls]}
            x = [_tokens(sent[call.part].x, sent[call.part].experts)[call.places] for call in calls]
            weights = [sent[call.part].weights.reshape(-1)[call.places] for call in calls]
            return header, [np.concatenate(x), np.concatenate(weights)] if calls else []

        def compute(call: Any, x: np.ndarray, weights: np.ndarray) -> list[np.ndarray]:
            part, expert, rows = call
            self._kept[layer, part, expert] = kept = _Kept(padded_rows(x, weights), rows)
            y, _ = self._stages.compute(self._params[layer, expert], np.int32(0), kept.sent)
            return [np.asarray(y)[:rows, 0]]

        received = self._exchange(f"rows {layer}", [message(calls) for calls in lists])
        self._asked[layer] = [header["calls"] for header, _ in received]
        back = self._exchange(f"results {layer}", self._answers(layer, received, compute))
        return {part: _summed(part, rows, lists, back) for part, rows in sent.items()}

    def backward(self, layer: int, g: Mapping[int, np.ndarray], sent: Mapping[int, PartRows]) -> dict[int, Any]:
        """Return the gradients of `PartRows.x` and `PartRows.weights`, by that of the sums, for each part."""
        lists = self._lists.pop(layer)

        def message(calls: list[_Call]) -> Message:
            rows = [_tokens(g[call.part], sent[call.part].experts)[call.places] for call in calls]
            return {}, [np.concatenate(rows)] if calls else []

        vectors: dict[int, dict[int, np.ndarray]] = {}

        def compute(call: Any, g: np.ndarray) -> list[np.ndarray]:
            part, expert, rows = call
            kept, stack = self._kept.pop((layer, part, expert)), self._params[layer, expert]
            zeros = zeros_of(stack, np.float32)
            padded = _padded(g, len(kept.sent.x))[:, None]
            found, grads = self._stages.compute_back(stack, np.int32(0), kept.sent, padded, zeros)
            vectors.setdefault(expert, {})[part] = flat(grads)
            return [np.asarray(found[0])[:rows, 0], np.asarray(found[1])[:rows, 0, 0]]

        received = self._exchange(f"gradients {layer}", [message(calls) for calls in lists])
        answers = self._answers(layer, received, compute)
        self._asked.pop(layer)
        back = self._exchange(f"back {layer}", answers)
        self._fold(layer, vectors)
        return {
            part: (_summed(part, rows, lists, back), _spread(part, rows.weights, lists, back))
            for part, rows in sent.items()
        }

    def _answers(self, layer: int, received: Sequence[Message], compute: Callable[..., Any]) -> list[Message]:
        """Return the results of all calls that members have asked for, to each its own."""
        answers: list[Message] = []
        for calls, (_, arrays) in zip(self._asked[layer], received, strict=True):
            results: list[list[np.ndarray]] = []
            first = 0
            for call in calls:
                results.append(compute(call, *(array[first : first + call[2]] for array in arrays)))
                first += call[2]
            answers.append(({}, [np.concatenate(each) for each in zip(*results, strict=True)]))
        return answers

    def _fold(self, layer: int, vectors: Mapping[int, Mapping[int, np.ndarray]]) -> None:
        """Add up the gradients of each expert as far as this member computes them."""
        parts = self._targets.shape[2]
        for expert in range(self._targets.shape[1]):
            own = np.nonzero(self._targets[layer, expert] == self._me)[0]
            if not len(own):
                continue
            given = vectors.get(expert, {})

            def leaf(node: Node, given: Mapping[int, np.ndarray] = given) -> Any:
                return given.get(node[0], _NOTHING) if node[1] - node[0] == 1 else None

            mine = nodes(parts, range(int(own[0]), int(own[-1]) + 1))
            self.grads[layer, expert] = {node: fold(node, leaf, _add) for node in mine}


def share_gradients(
    exchange: Exchange, own: Mapping[Key, dict[Node, Any]], holders: Mapping[Key, list[int]], place: tuple[int, int]
) -> dict[Key, Any]:
    """Return the gradients over all parts of the experts that this member holds, from all who computed some.

    None: no row has chosen the expert.

    Args:
        exchange: see `ExpertCalls`.
        own: this member's sums.
        holders: places of the members that hold each expert.
        place: place of this member, and the number of members.
    """
    me, members = place
    out: list[Message] = [({"nodes": []}, []) for _ in range(members)]
    for key, sums in own.items():
        for other in holders[key]:
            for node, total in sums.items() if other != me else ():
                out[other][0]["nodes"].append((*key, *node, total is not _NOTHING))
                out[other][1].extend([] if total is _NOTHING else [total])
    have = {key: dict(own.get(key, {})) for key, places in holders.items() if me in places}
    for other, (header, arrays) in enumerate(exchange("sums of experts", out)):
        arrived = iter(arrays)
        for layer, expert, first, last, there in header["nodes"] if other != me else ():
            have[layer, expert][first, last] = next(arrived) if there else _NOTHING
    found: dict[Key, Any] = {}
    for key, sums in have.items():
        total = fold((0, max(last for _, last in sums)), sums, _add)
        found[key] = None if total is _NOTHING else total
    return found


def padded_rows(x: np.ndarray, weights: np.ndarray) -> SentRows:
    """Return the rows [rows, dim] of one expert as its program takes them: up to a power of two, each a batch's row."""
    size = max(LEAST_ROWS, 1 << (len(x) - 1).bit_length())
    chosen = (np.arange(size) >= len(x)).astype(np.int32)  # 1: padding
    arrays: Any = _padded(x, size)[:, None], _padded(weights, size)[:, None, None], chosen[:, None, None]
    return SentRows(*arrays)


def _padded(x: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])


def _calls(part: int, chosen: np.ndarray, counts: np.ndarray) -> list[_Call]:
    """Return the calls of a part, and add their rows to `counts`."""
    order = np.argsort(chosen, kind="stable")
    sizes = np.bincount(chosen, minlength=len(counts) + 1)[: len(counts)]
    counts += sizes
    places = np.split(order, np.cumsum(sizes))
    return [_Call(part, expert, places[expert]) for expert in np.nonzero(sizes)[0].tolist()]


def _tokens(x: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """Return [tokens * top_k, dim], each token once for each choice."""
    return np.repeat(x.reshape(-1, x.shape[-1]), experts.shape[-1], axis=0)


def _placed(part: int, into: np.ndarray, lists: Sequence[list[_Call]], back: Sequence[Message], which: int) -> None:
    """Put the rows of a part that have come back where they belong."""
    for calls, (_, arrays) in zip(lists, back, strict=True):
        first = 0
        for call in calls:
            if call.part == part:
                into[call.places] = arrays[which][first : first + len(call.places)]
            first += len(call.places)


def _summed(part: int, rows: PartRows, lists: Sequence[list[_Call]], back: Sequence[Message]) -> np.ndarray:
    """Return the sum of each token's rows, the likeliest expert first, in float32."""
    top_k, dim = rows.experts.shape[-1], rows.x.shape[-1]
    every = np.zeros((rows.experts.size, dim), np.float32)
    _placed(part, every, lists, back, 0)
    total = every[0::top_k]
    for k in range(1, top_k):
        total = total + every[k::top_k]
    return total.reshape(rows.x.shape).astype(rows.x.dtype)


def _spread(part: int, weights: np.ndarray, lists: Sequence[list[_Call]], back: Sequence[Message]) -> np.ndarray:
    """Return the gradients of a part's weights."""
    found = np.zeros(weights.size, np.float32)
    _placed(part, found, lists, back, 1)
    return found.reshape(weights.shape)


def _add(one: Any, other: Any) -> Any:
    if one is _NOTHING or other is _NOTHING:
        return other if one is _NOTHING else one
    return one + other
