"""Drawing tokens: the distribution, its log-probabilities, and keys that depend on nothing but the request.

The key of a draw is a function of (seed, prompt id, sample id, position in the completion). It knows neither batch,
slot nor worker, so a lost rollout can be generated again, anywhere, and come out the same.
"""

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.losses import token_logprobs
from mesh import UserError, constrain

NEVER = -1e30


class Sampler(Configurable):
    """Temperature, top-k and top-p sampling; log-probabilities are those of exactly the distribution drawn from."""

    class Config(ConfigBase["Sampler"]):
        temperature: float = 1.0  # 0: greedy
        top_k: int | None = None
        top_p: float = 1.0

    def __init__(self, cfg: Config):
        if cfg.temperature < 0:
            raise UserError(f"Sampler.temperature is {cfg.temperature}; expected 0 (greedy) or more")
        if cfg.top_k is not None and cfg.top_k < 1:
            raise UserError(f"Sampler.top_k is {cfg.top_k}; expected 1 or more, or None for all tokens")
        if not 0 < cfg.top_p <= 1:
            raise UserError(f"Sampler.top_p is {cfg.top_p}; expected a share in (0, 1]")
        self.cfg = cfg

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn, so that the trainer's support would differ from the sampler's."""
        return self.cfg.top_k is not None or self.cfg.top_p < 1 or self.cfg.temperature == 0

    def distribution(self, logits: jax.Array) -> jax.Array:
        """float32 logits [..., vocab] of the distribution that `draw` draws from."""
        logits = logits.astype(jnp.float32)
        if self.cfg.temperature == 0:
            best = jnp.argmax(logits, axis=-1, keepdims=True)
            return jnp.where(jnp.arange(logits.shape[-1]) == best, 0.0, NEVER)
        logits = logits / self.cfg.temperature
        if self.cfg.top_k is not None:
            k = min(self.cfg.top_k, logits.shape[-1])
            smallest_kept = jax.lax.top_k(logits, k)[0][..., -1:]
            logits = jnp.where(logits < smallest_kept, NEVER, logits)
        if self.cfg.top_p < 1:
            ordered = -jnp.sort(-logits, axis=-1)
            mass = jax.nn.softmax(ordered, axis=-1)
            mass_before = jnp.cumsum(mass, axis=-1) - mass
            kept = jnp.sum(mass_before < self.cfg.top_p, axis=-1, keepdims=True)
            smallest_kept = jnp.take_along_axis(ordered, kept - 1, axis=-1)
            logits = jnp.where(logits < smallest_kept, NEVER, logits)
        return logits

    def draw(self, keys: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One token for each row.

        Args:
            keys: PRNG keys [groups, samples].
            logits: [groups, samples, vocab].

        Returns:
            tokens int32 [groups, samples] and their log-probabilities, float32.
        """
        logits = self.distribution(constrain(logits, "batch", None, None))
        keys = constrain(keys, "batch", None)
        tokens = jax.vmap(jax.vmap(jax.random.categorical))(keys, logits).astype(jnp.int32)
        return tokens, token_logprobs(logits, tokens)


def sample_keys(seed: jax.Array, prompt_ids: jax.Array, samples: int) -> jax.Array:
    """PRNG keys [groups, samples], one for each (prompt, sample).

    Args:
        seed: uint32, the run's.
        prompt_ids: uint32 [groups, 2], high and low half of each prompt's id.
        samples: how many of each prompt.
    """

    def of_prompt(prompt_id: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        for half in (prompt_id[0], prompt_id[1]):
            key = jax.random.fold_in(key, half)
        return jax.vmap(lambda sample: jax.random.fold_in(key, sample))(jnp.arange(samples))

    return jax.vmap(of_prompt)(prompt_ids)


def at_position(keys: jax.Array, position: jax.Array) -> jax.Array:
    """The keys [groups, samples] for the draw at this position of the completion."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(0, None)), in_axes=(0, None))
    return fold(keys, position)
