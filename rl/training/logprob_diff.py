"""Difference of trainer and sampler log-probabilities under the same version of the weights."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_like.layers.base import Params, bind
from mesh import shard_batch
from mesh.distributed import to_host
from rl.roles.messages import Group
from rl.training.batching import Batch
from rl.training.logprobs import pack_rows
from rl.training.program import make_score_rows, policy_logprobs


class LogprobDiff:
    """`logprob_diff`: by the forward pass of the update. `scoring_diff`: by `rl.training.logprobs`, in engine order."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        *,
        temperature: float,
        chunks: int,
        max_prompt: int,
        max_new: int,
        row_multiple: int,
    ):
        def logprobs(params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
            return policy_logprobs(bind(graphdef, params), batch, temperature, chunks).logprobs

        self.logprobs = jax.jit(logprobs)  # (params, arrays of the update) -> [g, n, t]
        self._score_rows = make_score_rows(graphdef, chunks)
        self._temperature = temperature
        self._sizes = {"max_prompt": max_prompt, "max_new": max_new, "row_multiple": row_multiple}

    def metrics(
        self, groups: list[Group], batch: Batch, arrays: dict[str, jax.Array], params: Params
    ) -> dict[str, float]:
        """Return mean and maximum of both over the sampled tokens; `params` are those that drew all of them."""
        figures: dict[str, float] = {}
        if batch["action_mask"].any():
            difference = np.abs(to_host(self.logprobs(params, arrays)) - batch["logprobs_behaviour"])
            difference = difference[batch["action_mask"]]
            figures |= {"logprob_diff_mean": float(difference.mean()), "logprob_diff_max": float(difference.max())}
        difference = np.abs(np.concatenate(self._scoring_differences(groups, params)))
        return {**figures, "scoring_diff_mean": float(difference.mean()), "scoring_diff_max": float(difference.max())}

    def _scoring_differences(self, groups: list[Group], params: Params) -> list[np.ndarray]:
        rows = pack_rows(groups, **self._sizes)
        arrays = shard_batch({name: rows[name] for name in ("tokens", "targets")})
        temperature = jnp.full(1, self._temperature, jnp.float32)
        scored = jax.tree.map(to_host, self._score_rows(params, **arrays, temperature=temperature)).logprobs()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return [
            (scored[row, first : first + len(r.tokens)] - r.logprobs)[r.action_mask]
            for row, (first, r) in enumerate(zip(rows["first"], rollouts, strict=True))
        ]


def only_version(groups: list[Group]) -> int | None:
    """Return the version that drew all tokens; None if several did: no single forward pass compares."""
    versions = {int(v) for group in groups for r in group.rollouts for v in r.versions}
    return versions.pop() if len(versions) == 1 else None
