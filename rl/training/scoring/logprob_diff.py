"""Difference of trainer and sampler log-probabilities under the same version of the weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from axlearn_like.kernels.exact.scope import Numerics
from axlearn_like.layers.base import Params, bind
from mesh import shard_batch
from mesh.batches import local_rows, to_local
from mesh.devices import platform
from mesh.distributed import ProcessGroup
from mesh.programs.shared import shared_program
from mesh.rules import complete_rows
from rl.protocol.headers import GroupHeader
from rl.protocol.messages import RolloutData
from rl.training.batching import Batch, PaddedRows
from rl.training.columns import sequence_places
from rl.training.logprobs import fill_rows, row_length
from rl.training.program import make_score_rows, scored_rows
from rl.training.scoring.update_logprobs import policy_logprobs, scored_arrays
from rl.training.spec import UpdateSpec

# Log-probabilities float32 [rows, length] of the rows that this process has of so many, by `rl.training.logprobs`.
RowsScorer = Callable[[dict[str, np.ndarray], int], np.ndarray]

# Mean and largest difference that rounding explains, by what computes or sends the weights. A wrong
# temperature, mask, version or cache is far above in the mean, or by whole nats in the largest. Measured: float32 1e-7
# and 8e-6; bfloat16 2.2e-3 and 0.12, largest of all tokens; float32 with weights sent as int8 3e-3 and 1.5e-2.
BOUNDS = {"float32": (1e-5, 1e-4), "bfloat16": (5e-3, 0.25), "int8": (1e-2, 0.25)}


def difference_bounds(dtype: str, codec: str, approximations: Sequence[str] = ()) -> dict[str, float]:
    """Return metrics: the bounds for activations of this type and weights sent by this codec.

    With `approximations`, which engines draw with and the trainer does not compute with, there is no bound: the
    difference is that of two policies. The same holds for codecs whose error is chosen.
    """
    if approximations or codec.partition(":")[0] in ("ecsq", "hevc"):
        return {}
    exact = dtype == "float32" and platform() == "cpu"  # accelerators round the factors of float32 products
    kind = "int8" if codec == "int8" else "float32" if exact and codec != "bf16" else "bfloat16"
    mean, greatest = BOUNDS[kind]
    return {"logprob_diff_mean_bound": mean, "logprob_diff_max_bound": greatest}


def make_logprobs(graphdef: nnx.GraphDef[Any], spec: UpdateSpec, *, routed: bool = True) -> Any:
    """Return jitted log-probabilities by the update's pass and head; `routed`: by the recorded experts."""

    def logprobs(params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
        known = batch if routed else {name: x for name, x in batch.items() if name != "routing"}
        return policy_logprobs(bind(graphdef, params), known, spec).logprobs

    key = "logprobs", graphdef, spec.temperature, spec.chunks, spec.head_tile, routed
    return shared_program(key, lambda: jax.jit(logprobs))


class LogprobDiff:
    """`logprob_diff`: by the forward pass of the update. `scoring_diff`: by `rl.training.logprobs`, in engine order."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        spec: UpdateSpec,
        sizes: PaddedRows,
        group: ProcessGroup,
        bounds: Mapping[str, float],
        *,
        reference: nnx.GraphDef[Any] | None = None,
        another_model: bool = False,
        numerics: Numerics = "default",
    ):
        """Make the programs that score.

        Args:
            sizes: the greatest numbers of tokens, and of what the rows that are scored together are a multiple.
            bounds: metrics of `difference_bounds`.
            reference: graph definition of a reference policy that is another model and scored here.
            another_model: the reference is another model, here or elsewhere, whose routers choose for themselves.
            numerics: numerics of the policy, where it is scored as the engine computes it.
        """
        other, self._other = reference or graphdef, another_model
        self._reference_logprobs = self._logprobs = make_logprobs(graphdef, spec)
        self._score_reference = self._score_rows = make_score_rows(graphdef, spec.chunks, numerics, spec.head_tile)
        if self._other:
            self._reference_logprobs = make_logprobs(other, spec, routed=False)
            self._score_reference = make_score_rows(other, spec.chunks, tile=spec.head_tile)
        self._temperature, self._group, self._bounds = spec.temperature, group, bounds
        self._length, self._row_multiple = row_length(sizes.max_prompt_tokens, sizes.max_new_tokens), sizes.row_multiple
        self._columns, self._max_new_tokens = [column for column in spec.columns if column.scored], sizes.max_new_tokens

    def compile(self, params: Params, rows: Mapping[str, Any], batches: Sequence[Mapping[str, Any]]) -> None:
        """Compile what `metrics` runs; the mesh is set.

        Args:
            rows: described tokens and targets of `score_rollouts`, with the columns that are scored.
            batches: described arrays of updates.
        """
        for arrays in batches:
            self._logprobs.lower(params, scored_arrays(arrays)).compile()
        self._score_rows.lower(params, **rows, temperature=self._temperatures()).compile()

    def logprobs(self, params: Params, arrays: Mapping[str, jax.Array], *, reference: bool = False) -> jax.Array:
        """Return log-probabilities of an update's arrays, as its targets, under the policy or the reference."""
        function = self._reference_logprobs if reference else self._logprobs
        return function(params, scored_arrays(arrays, routed=not (reference and self._other)))

    def metrics(
        self,
        batches: Sequence[tuple[Batch, dict[str, jax.Array]]],
        headers: Sequence[GroupHeader],
        contents: RolloutData,
        params: Params,
    ) -> dict[str, float]:
        """Return mean and maximum of both over the sampled tokens, and the bounds of the first.

        `params` are those that drew all of the tokens.

        Args:
            batches: the rows of this process and the arrays on the devices, of each microbatch.
            contents: the rollouts of `rows` of this process, at least.
        """
        differences = [np.zeros(0, np.float32)]
        for batch, arrays in batches:
            difference = np.abs(to_local(self.logprobs(params, arrays)) - batch["logprobs_behaviour"])
            given = batch.get("demonstrations", np.zeros((), bool)) != 0
            differences.append(difference[batch["action_mask"] & ~given])
        found = self._gathered("logprob_diff", np.concatenate(differences))
        found |= self._bounds if found else {}
        score = partial(self.score_rollouts, params)
        scoring = np.abs(np.concatenate(self._scoring_differences(headers, contents, score)))
        return {**found, **self._gathered("scoring_diff", scoring)}

    def divergence(self, headers: Sequence[GroupHeader], contents: RolloutData, reference: RowsScorer) -> np.ndarray:
        """Return log mu - log ref of every token, float64 [rollouts, max_new_tokens]; zero where none was sampled.

        Each process scores its own `rows`, of which it has the contents; what it finds comes to all by their devices.
        """
        found = self._scoring_differences(headers, contents, reference, routed=not self._other)
        rows = np.zeros((len(self._local_rows(headers)), self._max_new_tokens), np.float32)
        for row, (g, n), difference in zip(rows, self.rows(headers), found, strict=False):
            mask = contents[g][1][n].drawn
            row[: len(mask)][mask] = -difference
        everywhere = NamedSharding(jax.sharding.get_mesh(), jax.P())
        with complete_rows():
            sharded = shard_batch({"divergence": rows}, rows=self._count(headers))["divergence"]
        whole = np.asarray(jax.jit(_same, out_shardings=everywhere)(sharded), np.float64)
        return whole[: sum(len(header.rollouts) for header in headers)]

    def score_rollouts(
        self, params: Params, rows: dict[str, np.ndarray], count: int, *, reference: bool = False
    ) -> np.ndarray:
        """Return the log-probabilities of this process's rows of `count`, under the policy or the reference."""
        score = self._score_reference if reference else self._score_rows
        with complete_rows():
            arrays = shard_batch(rows, rows=count)
        found = score(params, **arrays, temperature=self._temperatures())
        return jax.tree.map(to_local, found).logprobs()

    def _temperatures(self) -> jax.Array:
        return jnp.full(1, self._temperature, jnp.float32)

    def rows(self, headers: Sequence[GroupHeader]) -> list[tuple[int, int]]:
        """Return group and rollout of each of the rows that this process scores."""
        rollouts = [(g, n) for g, header in enumerate(headers) for n in range(len(header.rollouts))]
        return [rollouts[row] for row in self._local_rows(headers) if row < len(rollouts)]

    def _gathered(self, name: str, differences: np.ndarray) -> dict[str, float]:
        """Return mean and maximum over all processes; nothing if there are no tokens."""
        own = (float(differences.mean()), float(differences.max()), differences.size) if differences.size else None
        means, greatest, sizes = zip(*([one for one in self._group.gather(own) if one] or [(0.0, 0.0, 0)]), strict=True)
        if not sum(sizes):
            return {}
        mean = means[0] if len(means) == 1 else float(np.average(means, weights=sizes))
        return {f"{name}_mean": mean, f"{name}_max": max(greatest)}

    def _count(self, headers: Sequence[GroupHeader]) -> int:
        with complete_rows():
            return scored_rows(sum(len(header.rollouts) for header in headers), self._row_multiple)

    def _local_rows(self, headers: Sequence[GroupHeader]) -> list[int]:
        with complete_rows():
            return local_rows(self._count(headers)).tolist()

    def _scoring_differences(
        self, headers: Sequence[GroupHeader], contents: RolloutData, score: RowsScorer, *, routed: bool = True
    ) -> list[np.ndarray]:
        """Return log pi by `score` less that recorded, for the sampled tokens of each rollout of `rows`."""
        count = len(self._local_rows(headers))
        own = [(contents[g][0], contents[g][1][n]) for g, n in self.rows(headers)]
        rows = fill_rows([(prompt, r.tokens) for prompt, r in own], count, self._length)
        places = sequence_places(own, count, self._length)
        rows |= {one.name: one.fill(places) for one in self._columns if routed or one.of_any_model}
        scored = score(rows, self._count(headers))
        return [
            (scored[row, len(prompt) - 1 : len(prompt) - 1 + len(r.tokens)] - r.logprobs)[r.drawn]
            for row, (prompt, r) in enumerate(own)
        ]


def _same(array: jax.Array) -> jax.Array:
    return array


def only_version(headers: Sequence[GroupHeader]) -> int | None:
    """Return the version that drew all tokens; None if several did: no single forward pass compares."""
    versions = {v for header in headers for r in header.rollouts if r.length for v in (r.oldest, r.newest)}
    return versions.pop() if len(versions) == 1 else None
