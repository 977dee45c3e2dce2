"""The table of an embedding or an output head, held by an engine as numbers of eight bits or fewer.

A token has one scale: as a row of the embedding and as a column of the head it is rounded by itself, so a tied table is
held once for both. A lookup reads the numbers and scales of its tokens alone; for logits the table becomes floats
beside the product, whose activations are not rounded.
"""

from collections.abc import Iterator, Sequence
from typing import Any, override

import jax
from flax import nnx
from jax.typing import DTypeLike

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.kernels.quantised_matmul import Numbers, dequantise, keep_in_loop, load_qwix, quantise
from axlearn_like.layers.base import Params, bind, split
from axlearn_like.layers.parameter_names import axes_of_matrix, kind_of
from axlearn_like.layers.wrappers.base import Wrapper, parameter, replaced


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
