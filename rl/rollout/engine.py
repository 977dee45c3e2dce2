"""The rollout engine: requests in, rollouts out, with the trainer's own layers.

This first engine batches statically: up to `groups` requests run together, prompt (trunk) computed once for all its
samples, then one token a step for every sample until all have stopped. Shapes are fixed, so nothing is compiled after
the first batch, and a request's tokens and log-probabilities do not depend on what else is in the batch.
"""

import dataclasses
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.layers.base import Params, bind, split
from axlearn_like.layers.context import BranchContext, TrunkContext, branch_cache
from mesh import UserError, constrain, shard_batch
from rl.messages import Prompt, Rollout
from rl.sampling import Sampler, at_position, sample_keys


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Generate `samples` completions of a prompt; `seed` is the run's."""

    prompt: Prompt
    samples: int
    seed: int


class RolloutEngine(Configurable):
    """Static batches over a key/value cache. `set_weights`, then `submit` and `step`, or simply `generate`."""

    class Config(ConfigBase["RolloutEngine"]):
        model: ConfigBase = REQUIRED
        stop_tokens: tuple[int, ...] = REQUIRED  # empty: every completion has full length
        max_prompt: int = REQUIRED  # tokens
        max_new: int = REQUIRED  # tokens, the stop token included
        samples: int = REQUIRED  # completions of each prompt
        groups: int = 16  # prompts in a batch
        sampler: Sampler.Config = Sampler.Config()

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.version = -1
        self._params: Params | None = None
        self._queue: deque[Request] = deque()
        sampler = cfg.sampler.build()
        graphdef, _ = split(jax.eval_shape(lambda: cfg.model.build(rngs=nnx.Rngs(0))))

        def run(params: Params, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return generate(bind(graphdef, params), sampler, cfg, batch)

        self._run = jax.jit(run)

    def set_weights(self, params: Params, version: int) -> None:
        """Swap the policy between batches."""
        self._params, self.version = params, version

    def submit(self, request: Request) -> None:
        """Queue a request; refused if it can never fit."""
        length = len(request.prompt.tokens)
        if not 1 <= length <= self.cfg.max_prompt:
            raise UserError(
                f"prompt {request.prompt.id} ({request.prompt.family}) has {length} tokens; "
                f"the engine takes 1 to {self.cfg.max_prompt} (RolloutEngine.max_prompt)"
            )
        if request.samples != self.cfg.samples:
            raise UserError(
                f"prompt {request.prompt.id} asks for {request.samples} samples; this engine is "
                f"built for {self.cfg.samples} (RolloutEngine.samples)"
            )
        self._queue.append(request)

    def step(self) -> list[Rollout]:
        """Run the oldest requests, as many as fit and share a seed, to their end; empty when nothing is queued."""
        if self._params is None:
            raise UserError("the engine has no weights yet; call set_weights first")
        requests: list[Request] = []
        while self._queue and len(requests) < self.cfg.groups:
            if requests and self._queue[0].seed != requests[0].seed:
                break  # a batch has one seed
            requests.append(self._queue.popleft())
        if not requests:
            return []
        out = jax.device_get(self._run(self._params, shard_batch(self._pack(requests))))
        return self._unpack(requests, out)

    def generate(self, requests: list[Request]) -> list[Rollout]:
        """All completions of all requests, in order of (request, sample)."""
        for request in requests:
            self.submit(request)
        rollouts: list[Rollout] = []
        while self._queue:
            rollouts += self.step()
        return rollouts

    def _pack(self, requests: list[Request]) -> dict[str, Any]:
        groups, size = self.cfg.groups, self.cfg.max_prompt - 1
        batch = {
            "trunk": np.zeros((groups, size), np.int32),
            "trunk_lengths": np.zeros(groups, np.int32),
            "last": np.zeros(groups, np.int32),
            "prompt_ids": np.zeros((groups, 2), np.uint32),
            "seed": np.uint32(requests[0].seed),
            "live": np.arange(groups) < len(requests),
        }
        for row, request in enumerate(requests):
            tokens, number = request.prompt.tokens, request.prompt.id
            batch["trunk"][row, : len(tokens) - 1] = tokens[:-1]
            batch["trunk_lengths"][row] = len(tokens) - 1
            batch["last"][row] = tokens[-1]
            batch["prompt_ids"][row] = number >> 32, number & 0xFFFFFFFF
        return batch

    def _unpack(self, requests: list[Request], out: dict[str, np.ndarray]) -> list[Rollout]:
        rollouts = []
        for row, request in enumerate(requests):
            for sample in range(request.samples):
                length = int(out["lengths"][row, sample])
                rollouts.append(
                    Rollout(
                        prompt_id=request.prompt.id,
                        sample_id=sample,
                        tokens=out["tokens"][row, sample, :length],
                        logprobs=out["logprobs"][row, sample, :length],
                        versions=np.full(length, self.version, np.int32),
                        action_mask=np.ones(length, bool),
                        finish_reason="stop" if out["stopped"][row, sample] else "length",
                    )
                )
        return rollouts


def generate(
    model: Any, sampler: Sampler, cfg: RolloutEngine.Config, batch: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Complete every prompt `cfg.samples` times; pure, to be traced.

    Args:
        model: a decoder with `hidden` and `logits`.
        batch: `trunk` int32 [g, p] (prompts without their last token, right-padded), `trunk_lengths` [g],
            `last` int32 [g], `prompt_ids` uint32 [g, 2], `seed`, `live` bool [g].

    Returns:
        `tokens` int32 [g, n, t], `logprobs` float32 [g, n, t], `lengths` int32 [g, n], `stopped` bool [g, n].
    """
    groups, size = batch["trunk"].shape
    n, steps = cfg.samples, cfg.max_new
    _, trunk = model.hidden(
        batch["trunk"], TrunkContext(jnp.broadcast_to(jnp.arange(size), (groups, size)))
    )
    cache = tuple(
        branch_cache(jax.tree.map(lambda leaf, i=index: leaf[i], trunk), n, steps)
        for index in range(model.num_layers)
    )
    keys = sample_keys(batch["seed"], batch["prompt_ids"], n)
    stop = jnp.asarray(cfg.stop_tokens, jnp.int32)

    def advance(state: dict[str, Any]) -> dict[str, Any]:
        step = state["step"]
        context = BranchContext(batch["trunk_lengths"], step, n)
        hidden, cache = model.hidden(state["feed"], context, state["cache"])
        tokens, logprobs = sampler.draw(at_position(keys, step), model.logits(hidden))
        hit = jnp.any(tokens[..., None] == stop, axis=-1)
        write = jax.lax.dynamic_update_slice_in_dim
        return {
            "step": step + 1,
            "feed": tokens,
            "cache": cache,
            "tokens": write(state["tokens"], tokens[..., None], step, axis=2),
            "logprobs": write(state["logprobs"], logprobs[..., None], step, axis=2),
            "lengths": jnp.where(state["running"], step + 1, state["lengths"]),
            "running": state["running"] & ~hit,
        }

    def start(value: jax.Array, *shape: int) -> jax.Array:
        """Loop state is born spread over the mesh, as each step will leave it."""
        return constrain(jnp.broadcast_to(value, shape), "batch", *[None] * (len(shape) - 1))

    final = jax.lax.while_loop(
        lambda state: (state["step"] < steps) & jnp.any(state["running"]),
        advance,
        {
            "step": jnp.int32(0),
            "feed": start(batch["last"][:, None], groups, n),
            "cache": cache,
            "tokens": start(jnp.int32(0), groups, n, steps),
            "logprobs": start(jnp.float32(0), groups, n, steps),
            "lengths": start(jnp.int32(0), groups, n),
            "running": start(batch["live"][:, None], groups, n),
        },
    )
    return {
        "tokens": final["tokens"],
        "logprobs": final["logprobs"],
        "lengths": final["lengths"],
        "stopped": ~final["running"],
    }
