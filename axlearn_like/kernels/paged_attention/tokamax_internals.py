"""Private parts of tokamax, and all that the stack uses of them: its batched ragged paged attention.

`tests/test_private_calls.py` fails if another file uses such a name, or if an installed tokamax is none of `CHECKED`.
"""

from importlib import import_module
from typing import Any

PACKAGE, CHECKED = "tokamax", ">=0.0.17,<0.1"


def ragged_paged_attention(*arrays: Any, **options: Any) -> Any:
    """Call the kernel without its own jit, which would donate the pool of a caller that does not."""
    return import_module("tokamax._src.ops.batched_rpa.kernel.wrapper").ragged_paged_attention.__wrapped__(
        *arrays, **options
    )


def block_sizes(**sizes: int) -> Any:
    """Return the kernel's record of block sizes."""
    return import_module("tokamax._src.ops.batched_rpa.kernel.configs").BlockSizes(**sizes)
