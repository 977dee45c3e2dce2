"""Benchmarks, and parts of some, that measure what this project says of itself: only a checkout has them."""

from importlib import import_module
from typing import Any

from mesh.errors import UserError
from tools.bench.harness.processes import ROOT

WHERE = "a checkout of this project, installed by `pip install -e .` (docs/benchmarks/index.md)"
IN_CHECKOUT = (ROOT / "tests" / "benches" / "commands.py").is_file()


def of_checkout(module: str, asked: str) -> Any:
    """Return a module of `tests.benches`.

    Args:
        asked: what needs it, as typed.

    Raises:
        UserError: this is an installed wheel.
    """
    if not IN_CHECKOUT:
        raise UserError(f"{asked} is in {WHERE}, and in no wheel")
    return import_module(f"tests.benches.{module}")
