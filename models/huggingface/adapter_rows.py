"""The matrices that can have low-rank factors, and the tensors of PEFT that these are.

A factor of a linear layer is a tensor for each layer, those of an expert for each expert: the names of transformers 4,
which PEFT translates for transformers 5. Experts that are one parameter in transformers (gpt-oss: `gate_up_proj`,
`down_proj`) have one tensor for all: lora_A [experts * rank, in], an expert after the other, and lora_B
[out, rank * experts]. PEFT finds them by `target_parameters`, and puts one wrapper around the other: the last
parameter's is the outer one.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from axlearn_like.layers.base import Params
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.parameter_names import matrix_axes
from axlearn_like.layers.wrappers.lora import factor_names
from models.huggingface.architectures import architecture_for
from models.huggingface.fused_adapters import A, B
from models.huggingface.rows import Row, Section, Tensor, tensors_of

_PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True)
class FactoredMatrix:
    """A matrix of all layers of a stack that can have factors; of experts one in each."""

    stack: str  # path of the stack, such as "layers."
    layers: tuple[int, ...]  # numbers of the layers in tensor names
    child: str  # the block's child, "attention" or "feed_forward"
    name: str  # the matrix's name in it, such as "q_dkqh" or "experts/gate_edf"
    row: Row  # tensor of the factor

    @property
    def packed(self) -> bool:
        """True for experts that are one parameter in transformers."""
        return bool(letters(self.name, "stack")) and self.row.name.count("{}") == 1

    @property
    def module(self) -> str:
        """The last word of PEFT's name of the module, "q_proj"; of packed experts the last two of the parameter."""
        return ".".join(self.row.name.removesuffix(".weight").split(".")[-1 - self.packed :])

    @property
    def input_first(self) -> bool:
        """True for a linear layer whose matrix is [in, out] in transformers: one of GPT-2 (`Conv1D`)."""
        return not self.packed and set(self.row.axes.partition(",")[0]) <= set(letters(self.name, "inputs"))

    @property
    def parameter(self) -> str:
        """The name by which PEFT finds packed experts: "mlp.experts.down_proj"."""
        return ".".join(self.row.name.split(".")[-3:])

    @property
    def fused(self) -> bool:
        """True for some outputs of a linear layer in transformers whose other outputs are another matrix of ours."""
        return "[" in self.row.axes

    def rows(self, wide: Collection[str] = (), inner: str = "") -> dict[str, Row]:
        """Return path of our factor, below the stack -> its tensor in PEFT: A, B, and the magnitudes of DoRA.

        Args:
            wide: modules with a rank for each of their matrices.
            inner: the parameter of packed experts that another one's wrapper is around.
        """
        names = factor_names(self.name, len(letters(self.name)))
        folder, part, own = f"{self.child}.lora", self.row.part, self.fused and self.module in wide
        stack, inputs, outputs = (letters(self.name, axes) for axes in ("stack", "inputs", "outputs"))
        module, rank = _PREFIX + self.row.name.removesuffix(".weight"), "[l]" if own else "l"
        if self.packed or self.fused:
            outputs = next(axes for axes in self.row.axes.split(",") if set(outputs) <= set(axes))
        if self.packed:
            module = module.rpartition(".")[0] + (".base_layer" if self.parameter == inner else "")
        stack = stack if self.packed else ""
        rows = {
            names.a: Row(f"{module}{A}", f"{stack}{rank},{inputs}", part, shared=self.fused and not own),
            names.b: Row(f"{module}{B}", f"{outputs},l{stack}", part),
            names.magnitude: Row(f"{module}.lora_magnitude_vector", outputs, part),
        }
        if self.packed:
            del rows[names.magnitude]  # PEFT refuses DoRA of parameters
        return {f"{folder}.{name.replace('/', '.')}": row for name, row in rows.items()}

    def first_names(self) -> set[str]:
        """Return PEFT's names of the first layer's factors, of the first expert's."""
        stack = [0] * (self.row.name.count("{}") - 1)
        return {row.name.format(self.layers[0], *stack) for row in self.rows().values()}


def matrices_of(cfg: Decoder.Config) -> Iterator[FactoredMatrix]:
    """Yield the matrices of a plain decoder that are linear layers in transformers, some outputs of one, or experts."""
    for section in architecture_for(cfg).sections(cfg):
        for path, row in section.rows.items():
            child, _, inner = path.partition(".")
            name = inner.replace(".", "/")
            if section.layers is None or matrix_axes(name, len(letters(name))) is None:
                continue
            matrix = FactoredMatrix(section.prefix, section.layers, child, name, row)
            inputs = next((axes for axes in row.axes.split(",") if set(letters(name, "inputs")) & set(axes)), "")
            linear = row.axes.count(",") == 1 and "[" not in inputs
            if matrix.packed or (linear and row.name.count("{}") == 1 + len(letters(name, "stack"))):
                yield matrix


def inner_parameter(matrices: Iterable[FactoredMatrix]) -> str:
    """Return the packed parameter, of all that are adapted, whose wrapper another is around; "": there is none."""
    found = list(dict.fromkeys(matrix.parameter for matrix in matrices if matrix.packed))
    return found[0] if len(found) > 1 else ""


def factor_tensors(
    factors: Mapping[str, Any], matrices: Iterable[FactoredMatrix], wide: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the tensors of PEFT for factors by our paths; `wide`: modules with a rank for each matrix."""
    tree: Params = {}
    for name, leaf in factors.items():
        put(tree, name, leaf)
    matrices = list(matrices)
    inner = inner_parameter(one for one in matrices if any(one.stack + path in factors for path in one.rows()))
    sections = [Section(one.stack, one.rows(wide, inner), one.layers) for one in matrices]
    return tensors_of(tree, sections, "PEFT")


def letters(name: str, axes: Literal["stack", "inputs", "outputs"] | None = None) -> str:
    """Return the letters of a matrix's axes, all or some: "edf" of experts/gate_edf, whose stack is "e"."""
    suffix = name.rpartition("_")[2]
    found = matrix_axes(name, len(suffix))
    return suffix if axes is None or found is None else "".join(suffix[axis] for axis in getattr(found, axes))


def put(params: Params, path: str, array: Any) -> None:
    """Put an array into a nested dict, at a path with dots."""
    *folders, last = path.split(".")
    folder: Any = params
    for key in folders:
        folder = folder.setdefault(key, {})
    folder[last] = array
