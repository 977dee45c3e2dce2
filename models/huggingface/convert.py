"""Parameters in memory from and to tensors with Hugging Face's names.

For whole checkpoints on disk see `models.huggingface.checkpoints`, which never holds them all.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.base import Params, build_abstract, split
from axlearn_like.layers.decoder import Decoder
from mesh.errors import did_you_mean
from models.huggingface.architectures import Architecture, architecture_for
from models.huggingface.rows import ConversionError, Tensor, tensors_of


def abstract_params(cfg: Decoder.Config) -> Params:
    """Return the parameters' shapes and dtypes; nothing is allocated."""
    return split(build_abstract(cfg))[1]


def unrounded_parameters(cfg: Decoder.Config) -> frozenset[str]:
    """Return the names of the parameters that layers compute with in their own type (`Layer.unrounded`)."""
    return frozenset(path.replace("/", ".") for path in build_abstract(cfg).unrounded_paths())


def expected_tensors(
    cfg: Decoder.Config, architecture: Architecture | None = None, packed: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of this model has: name -> shape and pieces.

    Args:
        architecture: None: the one that has such models.
        packed: names of tensors that are held as fewer bits, where some families have other axes.

    Raises:
        ConversionError: the model has a parameter without a counterpart in the architecture.
    """
    architecture = architecture or architecture_for(cfg)
    sections, abstract = architecture.sections(cfg), abstract_params(cfg)
    found = tensors_of(abstract, sections, architecture.name)
    if not packed or not architecture.packed:
        return found
    transposed = tensors_of(
        abstract, [section.transposed(architecture.packed) for section in sections], architecture.name
    )
    return {name: transposed[name] if name in packed else tensor for name, tensor in found.items()}


def from_huggingface(
    state: Mapping[str, np.ndarray], cfg: Decoder.Config, architecture: Architecture | None = None
) -> Params:
    """Parameters of `cfg` from tensors named as Hugging Face names them.

    Args:
        state: name -> array, of any float type.
        cfg: the decoder. Where it is tied, `lm_head.weight` may be left out, or be a copy of the embedding.
        architecture: None: the one that has such models.

    Returns:
        Nested dict of float32 host arrays, as `split(cfg.build(...))` has them.

    Raises:
        ConversionError: tensors are missing, unknown or of another shape, or the config has a parameter
            without a counterpart.
    """
    architecture = architecture or architecture_for(cfg)
    expected = expected_tensors(cfg, architecture)
    check_tensors({name: tensor.shape for name, tensor in state.items()}, expected, architecture)
    for copy, original in architecture.copies.items():
        if copy in state and copy not in expected and not np.array_equal(state[copy], state[original]):
            raise ConversionError(
                f"{copy} is not the copy of {original} that it should be: the config ties them; expected "
                "tie_word_embeddings false for a head of its own"
            )
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.float32), abstract_params(cfg))
    arrays = by_name(params)
    for name, tensor in expected.items():
        for piece in tensor.pieces:
            arrays[piece.parameter][piece.index] = piece.view(np.asarray(state[name]))
    return params


def to_huggingface(
    params: Params,
    cfg: Decoder.Config,
    dtype: Any = np.float32,
    architecture: Architecture | None = None,
    *,
    tied: bool = False,
) -> dict[str, np.ndarray]:
    """The inverse of `from_huggingface`: name -> contiguous host array of type `dtype`.

    Args:
        dtype: type of all tensors.
        architecture: None: the one that has such models.
        tied: return a tied head under its own name, too (the same array).

    Raises:
        ConversionError: a parameter has no counterpart.
    """
    architecture = architecture or architecture_for(cfg)
    arrays, state = by_name(params), {}
    for name, tensor in tensors_of(params, architecture.sections(cfg), architecture.name).items():
        state[name] = np.empty(tensor.shape, dtype)
        for piece in tensor.pieces:
            piece.view(state[name])[...] = np.asarray(arrays[piece.parameter][piece.index])
    copies = {copy: state[original] for copy, original in architecture.copies.items() if tied and original in state}
    return copies | state


def by_name(params: Any) -> dict[str, Any]:
    """Return path -> array, as rows name parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, Tensor],
    architecture: Architecture,
    where: str = "the tensors",
) -> None:
    """Refuse tensors that are not exactly those expected (and perhaps copies that `architecture` allows).

    Args:
        found: name -> shape.
        architecture: the architecture, whose copies and ignored names are allowed.
        where: the subject of the message.

    Raises:
        ConversionError: names what is missing, unknown or of another shape.
    """
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected and not architecture.may_have(name, found)]
    shapes = [
        f"{name} {tuple(found[name])}, expected {tensor.shape}"
        for name, tensor in expected.items()
        if name in found and tuple(found[name]) != tensor.shape
    ]
    problems = []
    if missing:
        problems.append(f"missing: {_listed(missing)}")
    if unknown:
        hint = did_you_mean(unknown[0], missing) if missing else ""
        problems.append(f"unknown: {_listed(unknown)}{hint}")
    if shapes:
        problems.append(f"wrong shape: {_listed(shapes)}")
    if problems:
        raise ConversionError(f"{where} are not those of this {architecture.name}; " + "; ".join(problems))


def _listed(names: list[str], limit: int = 8) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
