"""The base class of layers, and the two functions between a layer and its plain dict of parameters.

Layers are `nnx.Module`s only while they are built or traced. Outside, a model is a graph definition (static) and a
nested plain dict of arrays: that is what crosses `jax.jit`, what optimizers and checkpoints see, and what the
parameter server sends. Passing modules through `nnx.jit` instead costs 6 to 800 times the host time per step.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from axlearn_like.config import ConfigBase, Configurable, config_key, path_of, walk_configs
from axlearn_like.config.base import on_built
from axlearn_like.kernels.exact.scope import numerics_of
from axlearn_like.layers.parameter_names import is_matrix, path_name
from mesh.errors import UserError
from mesh.programs.draws import ComputedDraw, Draw, Initializer, TruncatedNormal, can_draw, drawn, is_draw
from mesh.programs.shared import Shared
from mesh.rules import axis_sizes, partition

Params = dict[str, Any]


class Workload(NamedTuple):
    """Tokens of one forward pass, on all devices together: what a layer counts its FLOPs for."""

    tokens: float  # number of tokens that go through the layers
    outputs: float  # number of tokens of which logits are computed
    # Window -> pairs of a query and a key that causal attention with that window sees; None: no window
    pairs: Callable[[int | None], float]


class Layer(nnx.Module, Configurable):
    """Base of all layers: `__init__(cfg, *, rngs)` creates parameters, `__call__` is pure."""

    projected: ClassVar[tuple[str, ...]] = ()  # own matrices that `project` alone multiplies with: adapters fit them
    grouped: ClassVar[tuple[str, ...]] = ()  # own stacks of matrices that a grouped product alone multiplies with
    # Own parameters that are not cast to the model's dtype: engines, codecs and exports keep theirs.
    unrounded: ClassVar[tuple[str, ...]] = ()
    # True: all sums of this very class are made by `project`, norms and contexts, so it has a form of fixed order
    # (kernels/exact/scope.py). Not inherited: a subclass says so itself.
    fixed_order: ClassVar[bool] = False

    def flops(self, work: Workload) -> float:
        """Return the FLOPs of a forward pass: those of products with the layer's matrices and of the layers within.

        A layer that computes other products (attention) overrides this and adds them.
        """
        total = 0.0
        for path, leaf in jax.tree_util.tree_leaves_with_path(dict(vars(self)), is_leaf=_counted):
            seen = work._replace(tokens=work.tokens * self.used_share(path_name(path)))
            if isinstance(leaf, Layer):
                total += leaf.flops(seen)
            elif isinstance(leaf, nnx.Variable) and is_matrix(path_name(path), leaf.ndim):
                total += 2.0 * seen.tokens * math.prod(leaf.shape)
        return total

    def unrounded_paths(self) -> Iterator[str]:
        """Yield the paths of what `unrounded` names here and in the layers within, joined by slashes."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(dict(vars(self)), is_leaf=_counted):
            name = path_name(path)
            if isinstance(leaf, Layer):
                yield from (f"{name}/{below}" for below in leaf.unrounded_paths())
            elif isinstance(leaf, nnx.Variable) and name in self.unrounded:
                yield name

    def holds_only(self, *names: str) -> bool:
        """Return True if all parameters are these, or in layers of these names: a fused form of the layer knows all."""
        return set(split(self)[1]) <= set(names)

    def used_share(self, path: str) -> float:
        """Return the share of the numbers of a layer or parameter within that each token meets: below 1 for experts."""
        return 1.0


def _counted(value: Any) -> bool:
    return isinstance(value, Layer | nnx.Variable)


def split(layer: nnx.Module) -> tuple[nnx.GraphDef[Any], Params]:
    """Return a layer as (static graph definition, nested plain dict of arrays)."""
    graphdef, state = nnx.split(layer)
    return graphdef, nnx.to_pure_dict(state)


def bind[T: nnx.Module](graphdef: nnx.GraphDef[T], params: Params) -> T:
    """Return the layer again, to be called inside a traced function."""
    return nnx.merge(graphdef, params)


def inexact_layers(cfg: ConfigBase[Any], platform: str) -> list[str]:
    """Return what of a decoder's config has no form of fixed order on a platform, each with its path and the reason."""
    found: list[str] = []
    if platform == "gpu":
        found.append("there are no kernels of fixed order for GPUs")
    if platform == "cpu" and getattr(cfg, "dtype", "float32") != "float32":
        found.append("dtype: on a CPU products of float32 alone have a fixed order")
    for path, node in walk_configs(cfg):
        owner = type(node).__owner__
        if not (isinstance(owner, type) and issubclass(owner, Layer)):
            continue
        if platform == "tpu" and not vars(owner).get("fixed_order", False):
            found.append(f"{path or 'model'}: {owner.__name__} has no form of fixed order")
        elif not getattr(node, "in_engine", True):  # a wrapper
            found.append(f"{path}: an engine computes without {owner.__name__}")
        for field, wanted in (("sinks", False), ("causal", True)):
            if platform == "tpu" and getattr(node, field, wanted) != wanted:
                found.append(f"{path}.{field}: the kernel expects {wanted}")
    return found


def refuse_inexact(cfg: ConfigBase[Any], platform: str) -> None:
    """Refuse exact numerics of a decoder's config where a layer has none (ConfigError, with the layers' paths)."""
    if numerics_of(cfg) == "exact":
        found = inexact_layers(cfg, platform)
        cfg.require("numerics", not found, f'"default" on a {platform.upper()} ({"; ".join(found)})')


_builds = Shared(kept=64)  # functions that build layers of zeros
_as: ContextVar[Literal["drawn", "zeros", "draws"]] = ContextVar("as", default="drawn")


@contextlib.contextmanager
def _born_as(what: Literal["zeros", "draws"]) -> Iterator[None]:
    """Make parameters zeros, or `Draw`s, in this block."""
    token = _as.set(what)
    try:
        yield
    finally:
        _as.reset(token)


def build_abstract(cfg: ConfigBase[Any], change: Callable[[Any], Any] | None = None) -> Any:
    """Return a layer with its arrays described, not made: shapes, types, and shardings on the mesh in force.

    It is `jax.eval_shape` of `cfg.build`, but traces no initializers, which are four fifths of the time of that.

    Args:
        change: change of the layer, before its arrays are described. With a function that stands in a module, not a new
            one for each call, an equal layer is not traced again.
    """
    # Tracing takes 20 to 60 ms, and an engine describes its policy three times: `jax.eval_shape` keeps what it has
    # traced, by the function, the mesh and the axis rules. Errors name the config's path.
    key = (config_key(cfg), path_of(cfg), change, on_built.get())
    return jax.eval_shape(_builds.get(key, lambda: partial(_build_zeros, cfg.clone(), change)))


def _build_zeros(cfg: ConfigBase[Any], change: Callable[[Any], Any] | None) -> Any:
    with _born_as("zeros"):
        layer = cfg.build(rngs=nnx.Rngs(0))
    return layer if change is None else change(layer)


def param(
    rngs: nnx.Rngs,
    shape: Sequence[int],
    axes: Sequence[str | None],
    init: Initializer,
    dtype: Any = jnp.float32,
) -> nnx.Param[jax.Array]:
    """Return a parameter created with its sharding; `axes` are logical names, one for each dimension of `shape`.

    Raises:
        UserError: a dimension does not divide over the mesh.
    """
    for dimension, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        sizes = {} if axis is None else axis_sizes(axis)
        if size % math.prod(sizes.values()):
            over = " x ".join(f"{name} {count}" for name, count in sizes.items() if count > 1)
            raise UserError(
                f"dimension {dimension} ({axis}) of a parameter of shape {tuple(shape)} is {size}, which does not "
                f"divide evenly over the mesh ({over})"
            )
    return placed_param(rngs, shape, init, dtype, partition(*axes))


def placed_param(
    rngs: nnx.Rngs, shape: Sequence[int], init: Initializer, dtype: Any, where: PartitionSpec | None
) -> nnx.Param[jax.Array]:
    """Return a parameter created with a partition over the mesh in force; None: there is no mesh."""
    if _as.get() == "zeros":
        return nnx.Param(jnp.zeros(shape, dtype, out_sharding=where))
    if _as.get() == "draws":
        undrawn: Any = Draw(rngs.params(), init, tuple(shape), dtype)
        return nnx.Param(undrawn)
    key = rngs.params()
    if draws_here(key):
        return nnx.Param(jnp.asarray(drawn(Draw(key, init, tuple(shape), dtype))))
    return nnx.Param(init(key, tuple(shape), dtype, out_sharding=where))


def draws_here(key: jax.Array) -> bool:
    """Return True where arrays of a key can be drawn by the host at once: on a CPU, without a mesh, in no trace."""
    if isinstance(key, Tracer) or not jax.sharding.get_abstract_mesh().empty:
        return False
    return _as.get() == "drawn" and can_draw(key.devices())


def draw_stack(build: Callable[[jax.Array], Any], keys: jax.Array) -> Any:
    """Return the layers of a stack, one for each key; `build` makes a layer of a key."""
    if draws_here(keys):
        with contextlib.suppress(ComputedDraw), _born_as("draws"):
            stack = jax.vmap(build)(keys)
            return jax.tree.map(
                lambda leaf: jnp.asarray(drawn(leaf)) if is_draw(leaf) else leaf, stack, is_leaf=is_draw
            )
    return jax.vmap(build)(keys)


def first_params(
    build: Callable[[jax.Array], Params], seed: int, like: Params, chosen: Callable[[Params], Params] = lambda all: all
) -> Params:
    """Return the first parameters of a model: on CPUs drawn by the host, elsewhere by a program.

    Numbers of the host have the bits of the initializer's own program. One program of a whole model may round the last
    bit of some otherwise, by the instructions that XLA chooses for it.

    Args:
        build: from a key to all parameters, with layers that `param` makes; pure.
        like: the chosen parameters, described, with shardings.
        chosen: parameters to return, of all of them.
    """
    if can_draw({device for leaf in jax.tree.leaves(like) for device in leaf.sharding.device_set}):
        with contextlib.suppress(ComputedDraw):
            return _drawn_on_host(build, seed, like, chosen)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(lambda key: chosen(build(key)), out_shardings=shardings)(jax.random.key(seed))


def _drawn_on_host(
    build: Callable[[jax.Array], Params], seed: int, like: Params, chosen: Callable[[Params], Params]
) -> Params:
    nowhere = Mesh(np.empty((), object), ())  # keys are not sharded
    with _born_as("draws"), jax.set_mesh(nowhere):
        draws = build(jax.random.key(seed))
    later = chosen(jax.tree.map(lambda draw: partial(drawn, draw), draws, is_leaf=is_draw))  # each a leaf

    def place(draw: Callable[[], np.ndarray], leaf: Any) -> jax.Array:
        array = draw()
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: array[index])

    return jax.tree.map(place, later, like)


def fan_in_init(fan_in: int) -> Initializer:
    """Return a normal initializer of variance 1 / fan_in, truncated at two standard deviations (0.77 of the variance).

    `fan_in` is explicit because weights may have several input axes.
    """
    return TruncatedNormal(fan_in**-0.5)


def cast_late[T](params: T, index: jax.Array | None, dtype: DTypeLike) -> T:
    """Return the parameters of layer `index` of a stack, such that their cast to `dtype` stays inside the loop.

    XLA for TPUs moves a cast to bfloat16 through slices, loops, selections and barriers: it casts the whole stack
    before the loop, and the copy lives through the forward and the backward pass. It does not move a cast across a
    multiplication, so each parameter is multiplied by an opaque 1, which changes no bit. Only where fsdp shards the
    stack; elsewhere the copy saves reading twice as many bytes.
    """
    if index is None or math.prod(axis_sizes("embed").values()) == 1:
        return params
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else _times_one(leaf, index), params)


@jax.custom_vjp
def _times_one(x: jax.Array, index: jax.Array) -> jax.Array:
    return x * jnp.where(index >= 0, 1, 0).astype(x.dtype)


_times_one.defvjp(lambda x, index: (_times_one(x, index), None), lambda _, gradient: (gradient, None))
