"""Quantised layers: weights, or whole products, of numbers of eight bits or fewer (kernels/quantised_matmul.py).

* `QuantisedWeights`, in training: weights are rounded in the forward pass (QAT). An engine gets the rounded weights.
* `QuantisedProducts`, in training and in the engine: weights and activations are rounded, and multiplied as such.
* `StoredWeights`, in an engine alone: weights are held as such numbers (PTQ), a half or a quarter of bfloat16.
  Embedding and head, if asked: `StoredVocabulary` below.

Of the table of an embedding or an output head, held so by an engine, a token has one scale: as a row of the embedding
and as a column of the head it is rounded by itself, so a tied table is held once for both. A lookup reads the numbers
and scales of its tokens alone; for logits the table becomes floats beside the product, whose activations are not
rounded.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, override

import jax
from flax import nnx
from jax.typing import DTypeLike

from axlearn_like.config import REQUIRED, ConfigBase, path_of, replace, walk_configs
from axlearn_like.kernels.quantised_matmul import (
    Numbers,
    dequantise,
    keep_in_loop,
    load_qwix,
    quantise,
    quantised_products,
    round_to,
)
from axlearn_like.layers.base import Params, bind, split
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.embedding import Head
from axlearn_like.layers.parameter_names import axes_of_matrix, kind_of
from axlearn_like.layers.wrappers.base import Wrapper, parameter, projected, replaced
from axlearn_like.layers.wrappers.matrix_forms import StackEntry
from mesh.errors import UserError


class QuantisedWeights(Wrapper):
    """The inner layer with every matrix rounded, one scale for each output channel or group of inputs.

    The forward pass uses the rounded weights (Jacob et al. 2018, arXiv 1712.05877, 3), the gradient goes to the full
    ones as if nothing had been rounded. Activations are not rounded, and products are those of the inner layer: this
    gives a model that loses nothing when its weights are stored so, and saves neither memory nor time in training.
    """

    class Config(Wrapper.Config):
        numbers: Numbers = "int8"
        group: int | None = None  # inputs that share a scale; None: all of an output channel

        @override
        def check_fields(self) -> None:
            self.require_least(1, "group")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        load_qwix()
        super().__init__(cfg, rngs=rngs)
        self.numbers: Numbers = cfg.numbers
        self.group = cfg.group
        check_group(cfg, self.names, split(self.inner)[1])

    def weights(self, params: Params) -> Params:
        """Return the rounded weights."""
        found = {name: parameter(params, name) for name in self.names}
        options = self.numbers, self.group
        return replaced(params, {name: round_to(w, _inputs(name, w.ndim), *options) for name, w in found.items()})


class QuantisedProducts(Wrapper):
    """The inner layer with activations and weights rounded before each product with a matrix.

    Products are of int8 or fp8 numbers where the devices have units for them. Rows are rounded one by one, so the
    trainer and the engine compute the same. Products of activations with each other (attention) stay as they are.
    """

    class Config(Wrapper.Config):
        numbers: Literal["int8", "fp8"] = "int8"

        @property
        @override
        def in_engine(self) -> bool:
            return True

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        load_qwix()
        super().__init__(cfg, rngs=rngs)
        self.numbers: Numbers = cfg.numbers
        check_products(cfg, self.inner, self.names)

    def weights(self, params: Params) -> Params:
        """Return the weights as they are: products round them."""
        return params

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the inner layer returns, computed with such products."""
        with quantised_products(self.numbers):
            return super().__call__(*args, **kwargs)


class StoredWeights(Wrapper):
    """The inner layer with every matrix held as a `QArray`, to be read and not to be trained.

    Parameters are those of the inner layer, with numbers at `.../q_dkqh/qvalue` and scales at `.../q_dkqh/scale`.
    """

    class Config(QuantisedWeights.Config):
        inner: ConfigBase = REQUIRED
        layers: tuple[Literal["attention", "feed_forward"], ...] = ("attention", "feed_forward")  # sublayers changed
        activations: Literal["int8", "fp8"] | None = None  # dtype of quantised activations; None: not quantised
        vocabulary: Numbers | None = None  # dtype of embedding and head, one scale a token; None: unchanged

        @override
        def check_fields(self) -> None:
            super().check_fields()
            whole = self.group is None and self.activations == self.numbers
            self.require("activations", self.activations is None or whole, f"None, or {self.numbers} with group=None")
            self.require("layers", bool(self.layers), "attention, feed_forward or both")

        @property
        def tags(self) -> tuple[str, ...]:
            """Approximations of what is drawn with such weights."""
            kinds = {"weights": self.numbers, "activations": self.activations, "vocabulary": self.vocabulary}
            return tuple(f"{numbers}-{kind}" for kind, numbers in kinds.items() if numbers)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        load_qwix()
        super().__init__(cfg, rngs=rngs)
        self.numbers: Numbers = cfg.numbers
        self.activations: Numbers | None = cfg.activations
        self.group = cfg.group
        if cfg.activations is not None:
            check_products(cfg, self.inner, self.names)
        params = split(self.inner)[1]
        check_group(cfg, self.names, params)
        nnx.update(self.inner, self.stored(params))

    def stored(self, params: Params) -> Params:
        """Return the inner layer's parameters, or stacks of them, as they are held."""
        weights = {name: parameter(params, name) for name in self.names}
        return replaced(
            params,
            {name: quantise(w, _inputs(name, w.ndim), self.numbers, self.group) for name, w in weights.items()},
        )

    @override
    def unrounded_paths(self) -> Iterator[str]:
        yield from super().unrounded_paths()
        yield from numbers_and_scales(self.names)

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        """Return what the inner layer returns for activations x."""
        graphdef, params = split(self.inner)
        held: dict[str, Any] = {name: parameter(params, name) for name in self.names}
        in_stack = {name: value for name, value in held.items() if isinstance(value, StackEntry)}  # read by a kernel
        x, params = keep_in_loop(x, replaced(params, dict.fromkeys(in_stack)))
        if self.activations is None:
            rest: dict[str, Any] = {name: parameter(params, name) for name in held if name not in in_stack}
            params = replaced(params, {name: dequantise(value, x.dtype) for name, value in rest.items()})
        params = replaced(params, in_stack)
        with quantised_products(self.activations):
            return bind(graphdef, params)(x, *args, **kwargs)

    def window_keys(self, latent_btw: jax.Array, positions_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the inner attention's keys and values of cached latents: products are with floats here, too."""
        graphdef, params = split(self.inner)
        held: dict[str, Any] = {name: parameter(params, name) for name in self.names}
        floats = {name: dequantise(value, latent_btw.dtype) for name, value in held.items()}
        return bind(graphdef, replaced(params, floats)).window_keys(latent_btw, positions_bt)


def stored_config[C: ConfigBase[Any]](model: C, how: StoredWeights.Config) -> C:
    """Return a copy of a model's config, plain for an engine, that holds its weights so.

    Raises:
        UserError: its layers round their products by themselves, or it has no blocks.
    """
    if any(isinstance(cfg, QuantisedProducts.Config) for _, cfg in walk_configs(model)):
        raise UserError(
            f"{path_of(how)}: expected None, as the policy's QuantisedProducts round the weights themselves"
        )
    how.check_fields()  # here it has the path that the user set
    made = model.clone()
    replace(
        made,
        Block.Config,
        lambda block: block.set(**{name: how.clone(inner=getattr(block, name)) for name in how.layers}),
    )
    if how.vocabulary is not None:
        assert isinstance(made, Decoder.Config), "engines draw by decoders"
        made.embedding = StoredVocabulary.Config(inner=made.embedding, numbers=how.vocabulary)
        if isinstance(made.head, Head.Config):
            made.head = StoredVocabulary.Config(inner=made.head, numbers=how.vocabulary)
    return made


def stored_params(model: Any, params: Params) -> Params:
    """Return a plain model's parameters as those of `stored_config`'s model, which may be abstract. Pure."""
    if isinstance(model, StoredWeights | StoredVocabulary):
        return {"inner": model.stored(params)}
    return {
        name: stored_params(getattr(model, name), value) if isinstance(value, dict) else value
        for name, value in params.items()
    }


def check_group(cfg: QuantisedWeights.Config | StoredWeights.Config, names: tuple[str, ...], params: Params) -> None:
    """Refuse a group that does not divide the inputs of a matrix (ConfigError)."""
    for name in names:
        weight = parameter(params, name)
        size = weight.shape[_inputs(name, weight.ndim)[-1]]
        cfg.require("group", cfg.group is None or size % cfg.group == 0, f"a divisor of the {size} inputs of {name}")


def check_products(cfg: Wrapper.Config, inner: Any, names: tuple[str, ...]) -> None:
    """Refuse matrices that are not multiplied by `project`, which rounds (UserError)."""
    known = {name for name, _ in projected(inner)}
    if others := [name for name in names if name not in known]:
        raise UserError(
            f"{path_of(cfg)}: products with {others[0]} are not rounded, as those of experts; expected another layer, "
            "or weights alone (QuantisedWeights, or StoredWeights with activations=None)"
        )
    cfg.require("match", known <= set(names), "'*': the products of a layer are rounded together")


def _inputs(name: str, ndim: int) -> tuple[int, ...]:
    return axes_of_matrix(name, ndim).inputs


class StoredVocabulary(Wrapper):
    """An embedding or a head with its table held as a `QArray`, to be read and not to be trained."""

    kinds = ("embedding", "head")

    class Config(Wrapper.Config):
        inner: ConfigBase = REQUIRED
        match: str | tuple[str, ...] = "weight_*"  # learned positions stay as they are
        numbers: Numbers = "int8"

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        load_qwix()
        super().__init__(cfg, rngs=rngs)
        self.numbers: Numbers = cfg.numbers
        nnx.update(self.inner, self.stored(split(self.inner)[1]))

    def stored(self, params: Params) -> Params:
        """Return the inner layer's parameters as they are held."""
        tables = {name: parameter(params, name) for name in self.names}
        return replaced(params, {n: quantise(w, _width(n, w.ndim), self.numbers) for n, w in tables.items()})

    @override
    def unrounded_paths(self) -> Iterator[str]:
        yield from super().unrounded_paths()
        yield from numbers_and_scales(self.names)

    def __call__(self, tokens_bt: jax.Array, dtype: DTypeLike, context: Any = None) -> jax.Array:
        """Return the embeddings of tokens [batch, length, dim] in `dtype`."""
        return self.inner(tokens_bt, dtype, context)

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """Return float32 logits [batch, length, vocab]."""
        graphdef, params = split(self.inner)
        x_btd, params = keep_in_loop(x_btd, params)
        tables: dict[str, Any] = {name: parameter(params, name) for name in self.names}
        floats = {name: dequantise(table, x_btd.dtype) for name, table in tables.items()}
        return bind(graphdef, replaced(params, floats)).logits(x_btd)


def numbers_and_scales(names: Sequence[str]) -> Iterator[str]:
    """Yield the paths, in a wrapper, of the parts of the inner layer's matrices that are held as `QArray`s."""
    yield from (f"inner/{name}/{part}" for name in names for part in ("qvalue", "scale"))


def _width(name: str, ndim: int) -> tuple[int, ...]:
    """Return the axis of the model's width, along which the numbers of a token share their scale."""
    axes = axes_of_matrix(name, ndim)
    return axes.outputs if kind_of(name, ndim) == "embedding" else axes.inputs
