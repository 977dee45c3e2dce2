"""Functions that compute the same are traced once in a process, and others never taken for them."""

import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from mesh.programs.shared import KEPT, forget_programs, shared_program


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    forget_programs()
    yield
    forget_programs()


def test_equal_keys_have_one_program_which_is_traced_once() -> None:
    traced: list[int] = []

    def make(factor: int):
        def scaled(x: jax.Array) -> jax.Array:
            traced.append(factor)
            return x * factor

        return lambda: jax.jit(scaled)

    results = [shared_program(("scaled", factor), make(factor))(jnp.ones(2)) for factor in (2, 3, 2, 3)]
    assert [float(x[0]) for x in results] == [2.0, 3.0, 2.0, 3.0]
    assert traced == [2, 3]


def test_a_key_that_cannot_be_hashed_shares_nothing() -> None:
    made = [shared_program(("a", [1]), object) for _ in range(2)]
    assert made[0] is not made[1]


def test_those_used_last_are_kept() -> None:
    first = shared_program(0, object)
    for key in range(1, KEPT):
        shared_program(key, object)
    assert shared_program(0, object) is first
    shared_program(KEPT, object)  # one too many: 1 goes, which was not used again
    assert shared_program(0, object) is first
    second = shared_program(1, object)
    assert shared_program(1, object) is second


def test_in_a_notebook_each_is_made_again_for_code_may_have_changed() -> None:
    first = shared_program("a", object)
    sys.ps1 = "In : "
    try:
        assert shared_program("a", object) is not first
    finally:
        del sys.ps1
    assert shared_program("a", object) is first


def test_programs_are_forgotten_with_a_function_that_a_test_replaces_and_with_no_variable():
    made = shared_program("kept", object)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXL_NAME", "value")
        assert shared_program("kept", object) is made
        patch.setattr("mesh.programs.shared.KEPT", 17)
        replaced = shared_program("kept", object)
        assert replaced is not made
    assert shared_program("kept", object) is not replaced
