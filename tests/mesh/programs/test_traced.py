"""Indices of layers that the compiler does not know, and layers that are alike, traced once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mesh.programs.shared import traced_once, unknown, unknown_indices


def test_indices_count_up_and_are_no_constants_of_the_program():
    def offsets(x, indices):
        return [x + 1009 * index for index in indices]

    hidden = jax.jit(lambda x: offsets(x, unknown_indices(4))).lower(jnp.arange(3)).compile()
    known = jax.jit(lambda x: offsets(x, range(4))).lower(jnp.arange(3)).compile()
    assert [int(x[0]) for x in hidden(jnp.arange(3))] == [0, 1009, 2018, 3027]
    assert "3027" in str(known.as_text())
    assert "2018" not in str(hidden.as_text()) and "3027" not in str(hidden.as_text())


def test_an_unknown_number_is_an_argument_of_kernels():
    def program(x, number):
        return [jnp.cos(x - number(value)) for value in (1009, 2018)]

    x = jnp.arange(3)
    hidden, known = (jax.jit(partial(program, number=kind)).lower(x).compile() for kind in (unknown, jnp.int32))
    for found, expected in zip(hidden(x), known(x), strict=True):
        np.testing.assert_array_equal(found, expected)
    kernels = [str(one.as_text()).split("\nENTRY")[0] for one in (hidden, known)]
    assert "1009" not in kernels[0] and "2018" not in kernels[0]
    assert "1009" in kernels[1] and "2018" in kernels[1]


def test_a_function_is_traced_once_for_arguments_that_are_alike():
    shapes = []

    def layer(x):
        shapes.append(x.shape)
        return x * 2

    def program(x, y):
        run = traced_once(layer)
        return run(run(x)), run(y)

    jax.jit(program).trace(jnp.ones(3), jnp.ones(5))
    assert shapes == [(3,), (5,)]
