"""The engine's decoding, compiled for an H100 that is not there: no second cache, and pages updated in place."""

from importlib.util import find_spec

import pytest
from click.testing import CliRunner

from tests.studies.aot_gpu import main

SMALL = ["--model", "Qwen3-0.6B", "--layers", "1"]


def has_plugin() -> bool:
    """Return True if jax finds a compiler for CUDA."""
    return find_spec("jax_plugins") is not None and any(find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13))


@pytest.mark.full
@pytest.mark.skipif(not has_plugin(), reason="jax's plugin for CUDA is not installed")
def test_pages_are_updated_in_place_and_nothing_else_is_as_large():
    found = CliRunner().invoke(main, [*SMALL, "--decode-from", "pages"], catch_exceptions=False)
    *_, line = found.output.splitlines()
    _, _, _, pages, windows, in_place, temporary, _ = (cell.strip() for cell in line.split("|")[:8])
    assert (float(windows), float(in_place)) == (0, float(pages))
    assert float(temporary) < float(pages)


@pytest.mark.skipif(has_plugin(), reason="jax's plugin for CUDA is installed")
def test_a_missing_plugin_is_named():
    found = CliRunner().invoke(main, SMALL)
    assert found.exit_code == 1 and "expected the extra cuda to be installed" in found.output
