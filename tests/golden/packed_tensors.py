"""Matrices of 4 and 8 bits as transformers reads them: tests/models/golden/packed_tensors.npz.

Run as tests/golden/reference/decoders.py is:

    golden/bin/python tests/golden/packed_tensors.py tests/models/golden

The file holds `blocks` and `scales` of MXFP4 with `mxfp4`, the bits of what transformers makes of them; and float8
`values` (their bits) and `factors` with `fp8`.
"""

# pyright: reportMissingImports=false

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

MATRICES, OUT, BLOCKS = 2, 24, 3
ROWS, COLUMNS, BLOCK = 48, 64, (16, 32)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of bfloat16 numbers."""
    return tensor.view(torch.int16).numpy().view(np.uint16)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (MATRICES, OUT, BLOCKS, 16), np.uint8)
    scales = rng.integers(110, 135, (MATRICES, OUT, BLOCKS), np.uint8)
    scales[0, 0], scales[0, 1] = (0, 1, 254), (2, 250, 127)
    mxfp4 = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    values = rng.integers(0, 256, (ROWS, COLUMNS), np.uint8)
    values[values & 127 == 127] = 0  # not a number
    factors = np.exp(rng.normal(-8, 2, (ROWS // BLOCK[0], COLUMNS // BLOCK[1]))).astype(np.float32)
    eight = torch.from_numpy(values).view(torch.float8_e4m3fn)
    fp8 = Fp8Dequantize(None)._dequantize_one(eight, torch.from_numpy(factors), torch.bfloat16)
    arrays = {"blocks": blocks, "scales": scales, "mxfp4": bits(mxfp4), "values": values, "factors": factors}
    np.savez_compressed(folder / "packed_tensors.npz", **arrays, fp8=bits(fp8))


if __name__ == "__main__":
    main()
