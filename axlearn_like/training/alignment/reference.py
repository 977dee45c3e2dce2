"""Reference policies: what a KL term holds the policy near. All are sharded as the policy is.

Frozen parameters, such as the base under LoRA adapters, are the policy's own, so no reference holds them twice.
"""

from collections.abc import Callable, Collection
from typing import Any, override

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.checkpoint.reader import CONSTANT
from axlearn_like.config import ConfigBase, ConfigError, Configurable, path_of
from axlearn_like.layers.base import Params
from axlearn_like.layers.parameter_names import merged, only, path_name, without

_ADAPTER = "/lora/"  # part of the path of every adapter's parameter


class Reference(Configurable):
    """Base of reference policies.

    Of a step, `params` are asked for before the update, `updated` is called after it, and `saved` at a checkpoint.
    """

    class Config(ConfigBase["Reference"]):
        def version_at(self, version: int) -> int | None:
            """Return the version of the policy that the reference is, or is made of, when the policy is at `version`.

            None: it is made of several.
            """
            return 0

        @property
        def another_model(self) -> bool:
            """True if its layers are not the policy's."""
            return False

        def check_policy(self, model: ConfigBase, params: Params, frozen: Collection[str]) -> None:
            """Refuse a policy of which this is no reference; `params` may be abstract, and the mesh is set."""

    graphdef: nnx.GraphDef[Any] | None = None  # graph of another model as reference; None: the policy's own

    def __init__(self, cfg: Config, *, frozen: Collection[str]):
        """Take the paths of the parameters that no update changes."""
        self.cfg, self._frozen = cfg, frozen

    def start(self, params: Params) -> None:
        """Begin with version 0."""

    def params(self, params: Params) -> Params:
        """Return the reference's parameters, given the policy's."""
        raise NotImplementedError

    def alone(self, policy: Callable[[], Params]) -> Params:
        """Return the parameters where there is no policy beside it; `policy()` reads its version of `version_at`."""
        return self.params(policy())

    def updated(self, step: int, params: Params) -> None:
        """Follow the policy after its update number `step`."""

    def describe(self, params: Params) -> dict[str, Any]:
        """Return the abstract arrays of `saved`; `params` are abstract."""
        return {}

    def memory(self, params: Params) -> dict[str, Any]:
        """Return the abstract arrays that are held beside the policy's."""
        return self.describe(params)

    def saved(self) -> dict[str, Any]:
        """Return arrays for a checkpoint, by their keys in it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `saved` returned, out of the state of a checkpoint."""


class FrozenCopy(Reference):
    """Version 0, or the latest version that is a multiple of `reset_every`. A checkpoint links the file of the last."""

    class Config(Reference.Config):
        reset_every: int | None = None  # updates between resets to the policy; None: version 0 for the whole run

        @override
        def version_at(self, version: int) -> int | None:
            return 0 if self.reset_every is None else version - version % self.reset_every

        @override
        def check_fields(self) -> None:
            self.require_least(1, "reset_every")

    def __init__(self, cfg: Config, *, frozen: Collection[str]):
        super().__init__(cfg, frozen=frozen)
        self._every, self._copy = cfg.reset_every, {}
        self._copied: Any = jax.jit(lambda params: jax.tree.map(jnp.copy, params))

    @override
    def start(self, params: Params) -> None:
        self._copy = self._copied(without(params, self._frozen))  # the step donates its own

    @override
    def params(self, params: Params) -> Params:
        return merged(params, self._copy)

    @override
    def updated(self, step: int, params: Params) -> None:
        if self._every is not None and step % self._every == 0:
            self.start(params)

    @override
    def describe(self, params: Params) -> dict[str, Any]:
        return {CONSTANT: {"reference": without(params, self._frozen)}}

    @override
    def saved(self) -> dict[str, Any]:
        return {CONSTANT: {"reference": self._copy}}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self._copy = state.pop(CONSTANT)["reference"]


class WithoutAdapters(Reference):
    """The policy with its LoRA adapters off: the frozen base, of which there is no second copy."""

    class Config(Reference.Config):
        @override
        def check_policy(self, model: ConfigBase, params: Params, frozen: Collection[str]) -> None:
            names = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
            moving = sorted(name for name in names - set(frozen) if _ADAPTER not in f"/{name}")
            least = min(moving, default="")
            some = any(_ADAPTER in f"/{name}" for name in names)
            fits = some and not moving
            why = f"{least} is trained too" if moving and some else "the policy has no adapters"
            if not fits:
                path, wanted = path_of(self), "a policy of LoRA adapters on a frozen base, or FrozenCopy.Config()"
                raise ConfigError(f"{path}: expected {wanted}; {why}", path)

    def __init__(self, cfg: Config, *, frozen: Collection[str]):
        super().__init__(cfg, frozen=frozen)
        self._off: Params = {}

    @override
    def params(self, params: Params) -> Params:
        if not self._off:
            names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
            adapters = only(params, [name for name in names if _ADAPTER in f"/{name}"])
            self._off = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree))(adapters)
        return merged(params, self._off)


class MovingAverage(Reference):
    """An exponential moving average of the versions, in float32: each update takes 1 - decay of the new one."""

    class Config(Reference.Config):
        decay: float = 0.99

        @override
        def version_at(self, version: int) -> int | None:
            return None

        @override
        def check_fields(self) -> None:
            self.require("decay", 0 < self.decay < 1, "a share between 0 and 1")

    def __init__(self, cfg: Config, *, frozen: Collection[str]):
        super().__init__(cfg, frozen=frozen)
        self._average: Params = {}

        def follow(average: Params, params: Params) -> Params:
            return jax.tree.map(lambda a, p: a + (1 - cfg.decay) * (p.astype(jnp.float32) - a), average, params)

        self._follow: Any = jax.jit(follow, donate_argnums=0)
        self._begun: Any = jax.jit(lambda params: jax.tree.map(lambda p: jnp.copy(p.astype(jnp.float32)), params))
        self._typed: Any = jax.jit(
            lambda average, params: jax.tree.map(lambda a, p: a.astype(p.dtype), average, params)
        )

    @override
    def start(self, params: Params) -> None:
        self._average = self._begun(without(params, self._frozen))

    @override
    def params(self, params: Params) -> Params:
        return merged(params, self._typed(self._average, without(params, self._frozen)))

    @override
    def updated(self, step: int, params: Params) -> None:
        self._average = self._follow(self._average, without(params, self._frozen))

    @override
    def describe(self, params: Params) -> dict[str, Any]:
        abstract = lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding)  # noqa: E731
        return {"reference": jax.tree.map(abstract, without(params, self._frozen))}

    @override
    def saved(self) -> dict[str, Any]:
        return {"reference": self._average}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self._average = state.pop("reference")
