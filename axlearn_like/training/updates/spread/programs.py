"""The programs of an update with spread experts: those of zebra parallelism, for one expert at a time."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.elastic.experts import LEAST_ROWS
from axlearn_like.layers.base import Params
from axlearn_like.learner import Learner
from axlearn_like.learner.expert_bias import without_loads
from axlearn_like.learner.grad_norms import grad_squares
from axlearn_like.training.losses import Loss, Metrics
from axlearn_like.training.updates.spread.calls import padded_rows
from axlearn_like.training.updates.spread.cut import zeros_of
from axlearn_like.training.updates.zebra.split import matrices_of
from axlearn_like.training.updates.zebra.stages import AttentionStages, ExpertStages
from axlearn_like.training.updates.zebra.step import norms_together


class SpreadPrograms:
    """Programs of a member, on its devices; those of experts are for one expert of one layer, all alike.

    Attributes:
        shape: number of layers, and of experts of each.
        attention: all but the experts.
        expert: a call of an expert.
    """

    def __init__(self, model: Any, loss: Loss, learner: Learner):
        """Take the config of a decoder, resolved, of which all layers have experts."""
        feed = model.block.feed_forward
        self.shape: tuple[int, int] = (model.num_layers, feed.num_experts)
        self.attention, self.expert = AttentionStages(model, loss, 1), ExpertStages(feed.experts, 0, 1)
        self._learner, self._top_k = learner, feed.router.top_k
        self.updated: Any = jax.jit(self._updated, donate_argnums=0)  # (part of the state, its gradients, norms)
        self.square: Any = jax.jit(lambda grads: grad_squares(grads)["grad_norm"])
        self.norms: Any = jax.jit(_norms)

    def rehearse(self, rest: Any, expert: Any, batch: Any) -> None:
        """Run each program once, on zeros.

        Args:
            rest: described state of all but the experts, `params` and `opt_state`.
            expert: that of one expert.
            batch: rows of a part.
        """
        stages, (rest, expert) = self.attention, zeros_of((rest, expert))
        params, grads = rest["params"], stages.zeros(rest["params"])
        x = stages.embed(params, batch)
        done = stages.attend(params, np.int32(0), (x,), batch)
        summed = zeros_of(x)
        done = stages.attend(params, np.int32(0), (done.residual, summed), batch)
        rounds = [done.aux] * self.shape[0]
        _, of_x, of_losses, grads = stages.finish(params, (done.residual, summed), rounds, batch, grads)
        given = done.x, batch, of_x, (of_losses, [zeros_of((done.sent.x, done.sent.weights))])
        of_x, grads = stages.attend_back(params, np.int32(0), *given, grads)
        grads = stages.embed_back(params, batch, of_x, grads)
        matrices = matrices_of(expert["params"])
        for rows in self._sizes(done.sent.experts.size // self._top_k):
            call = padded_rows(np.zeros((rows, x.shape[-1]), x.dtype), np.zeros(rows, np.float32))
            y, _ = self.expert.compute(matrices, np.int32(0), call)
            self.expert.compute_back(matrices, np.int32(0), call, np.asarray(y), zeros_of(matrices, np.float32))
        norms = self.norms(jax.tree.map(np.asarray, grads), np.zeros(self.shape, np.float32))
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), expert["params"])
        self.square(zeros)
        jax.block_until_ready(self.updated(rest, jax.tree.map(np.asarray, grads), norms))
        jax.block_until_ready(self.updated(expert, zeros, norms))

    def _sizes(self, tokens: int) -> Iterator[int]:
        """Yield the sizes of calls, for a part of so many tokens."""
        size = LEAST_ROWS
        while size < 2 * tokens:
            yield min(size, tokens)
            size *= 2

    def _updated(self, part: Any, grads: Params, norms: Metrics) -> tuple[Any, Metrics]:
        params, opt_state, metrics = self._learner.update(grads, part["opt_state"], part["params"], norms=norms)
        del metrics["update_norm"]  # the norm of a part alone
        return {"params": params, "opt_state": opt_state}, metrics


def _norms(rest: Any, squares: jax.Array) -> Metrics:
    """Return the norms of the rest's gradients and of experts, by the squares of each."""
    of_experts = jnp.sum(squares)
    both = {"grad_norm": of_experts, "grad_norm/experts": of_experts}
    return norms_together([grad_squares(without_loads(rest)), both])
