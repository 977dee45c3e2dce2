"""Search for the best step that fits: mesh shapes, remat presets and microbatches."""

from pathlib import Path
from typing import Any

from axlearn_like.config import ConfigBase
from mesh.errors import UserError
from mesh.topology import Topology


def run_sweep(
    cfg: ConfigBase[Any], topology: Topology, *, limit: int, cache: Path | None, options: Any, as_json: bool
) -> None:
    raise UserError("--sweep is not there yet")
