"""The form in which a model's matrices are held as fewer bits: `quantization_config` of a `config.json`."""

from typing import Literal, NamedTuple

from models.huggingface.config_json import ConfigJson

PACKING = "quantization_config"


class TensorPacking(NamedTuple):
    """How the matrices are held; those that are not are held as they are."""

    # fp8 (e4m3 numbers in blocks with float32 scales) or mxfp4 (e2m1 numbers, 32 with a power of two)
    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] = (128, 128)  # rows and columns of an fp8 matrix that have the same scale


_METHODS: dict[str, Literal["fp8", "mxfp4"]] = {"fp8": "fp8", "mxfp4": "mxfp4"}


def unread_packing(json: ConfigJson) -> str | None:
    """Return the method of a `config.json` that is not read, such as bitsandbytes; the tensors may be floats anyway."""
    found = json.nested(PACKING)
    method = None if found is None else found.text("quant_method")
    return None if method in _METHODS else method


def read_packing(json: ConfigJson) -> TensorPacking | None:
    """Return what a `config.json` says, None where nothing is packed, or by an `unread_packing`.

    Raises:
        ConfigJsonError: it is another form of fp8; names the field.
    """
    found = json.nested(PACKING)
    method = None if found is None else _METHODS.get(found.text("quant_method"))
    if found is None or method is None:
        return None
    if method == "mxfp4":
        return TensorPacking(method)
    found.only("fmt", "e4m3")
    found.only("activation_scheme", "dynamic")
    block = found.array("weight_block_size", [128, 128])
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise found.error("weight_block_size", "two sizes, such as [128, 128]", f"{block!r}")
    return TensorPacking(method, (block[0], block[1]))
