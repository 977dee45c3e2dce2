"""The digest of a program: the same however its private functions are named and shared, another for another program."""

import jax
import jax.numpy as jnp
import pytest

from mesh.programs.digest import program_digest

ONCE = """module @jit_f {
  func.func public @main(%arg0: tensor<4xi32>) -> tensor<4xi32> {
    %0 = call @half(%arg0) : (tensor<4xi32>) -> tensor<4xi32>
    %1 = call @half(%0) : (tensor<4xi32>) -> tensor<4xi32>
    return %1 : tensor<4xi32>
  }
  func.func private @half(%arg0: tensor<4xi32>) -> tensor<4xi32> {
    %0 = call @"<lambda>"(%arg0) : (tensor<4xi32>) -> tensor<4xi32>
    return %0 : tensor<4xi32>
  }
  func.func private @"<lambda>"(%arg0: tensor<4xi32>) -> tensor<4xi32> {
    %0 = stablehlo.divide %arg0, %arg0 : tensor<4xi32>
    return %0 : tensor<4xi32>
  }
}
"""
SECOND = ONCE.index("%1 = call @half")
TWICE = (
    ONCE[:SECOND]
    + ONCE[SECOND:].replace("call @half", "call @half_7", 1)[:-2]
    + """  func.func private @half_7(%arg0: tensor<4xi32>) -> tensor<4xi32> {
    %0 = call @"<lambda>"(%arg0) : (tensor<4xi32>) -> tensor<4xi32>
    return %0 : tensor<4xi32>
  }
}
"""
)


def test_names_of_private_functions_and_how_often_one_is_written_do_not_matter():
    assert "@half_7(%0)" in TWICE
    assert program_digest(ONCE) == program_digest(TWICE)
    assert program_digest(ONCE) == program_digest(ONCE.replace('@"<lambda>"', '@"<lambda>_3"'))


@pytest.mark.parametrize("changed", ["divide", "jit_f", "tensor<4xi32>"])
def test_a_program_that_computes_something_else_has_another_digest(changed: str):
    other = {"divide": "multiply", "jit_f": "jit_g", "tensor<4xi32>": "tensor<8xi32>"}[changed]
    assert program_digest(ONCE) != program_digest(ONCE.replace(changed, other))
    assert program_digest(TWICE) != program_digest(TWICE.replace("call @half_7(%0)", "call @half_7(%arg0)"))


def test_the_text_of_jax_is_read():
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return jnp.where(x > 0, jnp.sort(x), x // 3)

    def outer(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, y: inner(y) + inner(2 * y), x)

    def lowered(size: int) -> str:
        return jax.jit(outer).lower(jax.ShapeDtypeStruct((size,), jnp.int32)).as_text()

    text = lowered(4)
    assert text.count("func.func private") > 1
    assert program_digest(text) == program_digest(text.replace("@inner", "@inner_5"))
    assert program_digest(text) != program_digest(lowered(5))
