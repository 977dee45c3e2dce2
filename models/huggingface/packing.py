"""The form in which a model's matrices are held as fewer bits: `quantization_config` of a `config.json`."""

from typing import Literal, NamedTuple

from models.huggingface.config_json import ConfigJson

PACKING = "quantization_config"


class TensorPacking(NamedTuple):
    """How the matrices are held; those that are not are held as they are.

    Attributes:
        method: fp8 (e4m3 numbers in blocks with float32 scales) or mxfp4 (e2m1 numbers, 32 with a power of two).
        block: rows and columns of an fp8 matrix that have the same scale.
    """

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] = (128, 128)


def read_packing(json: ConfigJson) -> TensorPacking | None:
    """Return what a `config.json` says, None where nothing is packed.

    Raises:
        ConfigJsonError: it is another form; names the field.
    """
    found = json.nested(PACKING)
    if found is None:
        return None
    methods: dict[str, Literal["fp8", "mxfp4"]] = {"fp8": "fp8", "mxfp4": "mxfp4"}
    method = found.choice("quant_method", methods)
    if method == "mxfp4":
        return TensorPacking(method)
    found.only("fmt", "e4m3")
    found.only("activation_scheme", "dynamic")
    block = found.array("weight_block_size", [128, 128])
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise found.error("weight_block_size", "two sizes, such as [128, 128]", f"{block!r}")
    return TensorPacking(method, (block[0], block[1]))
