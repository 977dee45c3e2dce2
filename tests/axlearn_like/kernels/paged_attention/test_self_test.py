"""Self-test of a kernel: that a kernel which its compiler refuses is named, whatever is raised."""

import jax
import jax.numpy as jnp
import pytest

import axlearn_like.kernels.paged_attention.ragged as ragged
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.kernels.paged_attention.self_test import KernelDisagrees, KernelShapes, run_self_test
from mesh import UserError

SHAPES = KernelShapes(heads=(2, 1, 128), page_size=4, dtype=jnp.float32, longest=32, chunk=4)


class Refused(Exception):
    """Stands for an error of Mosaic, which is no JaxRuntimeError and has no public name."""


@pytest.mark.parametrize("error", [Refused, NotImplementedError, ValueError, jax.errors.JaxRuntimeError])
def test_a_kernel_that_does_not_compile_is_named_with_what_was_raised(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
):
    match = rf"self-test of .*decoding of 7 rows: it does not run: {error.__name__}: strided load; an engine"
    with pytest.raises(KernelDisagrees, match=match):
        run_with(error("strided load\nin a kernel"), monkeypatch)


def test_what_the_user_can_correct_is_said_as_it_is(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="^a page table"):
        run_with(UserError("a page table"), monkeypatch)


def run_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(ragged, "write_pages", refuse)
    kernel = PagedKernel.Config(interpret=True).build()
    run_self_test(kernel, SHAPES, [ScoreRules()])
