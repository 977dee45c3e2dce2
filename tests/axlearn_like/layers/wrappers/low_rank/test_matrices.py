"""Updates of rows by adapters of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.wrappers.low_rank.matrices import RowAdapted

pytestmark = pytest.mark.numerics


@pytest.mark.slow
@pytest.mark.parametrize(("width", "rank", "out"), [(32, 1, 48), (64, 4, 64), (512, 64, 1536)])
def test_a_token_has_the_same_bits_alone_in_a_draft_and_in_a_chunk(width: int, rank: int, out: int):
    """Products with a vector (one token, or rank 1) have another order of sums on some CPUs."""
    rng = np.random.default_rng(0)
    x, a, b = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((4, 64, width), (4, width, rank), (4, rank, out))
    )

    @jax.jit
    def update(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return RowAdapted(jnp.zeros(()), a, b).update(x, None, None)

    whole = np.asarray(update(x, a, b))
    np.testing.assert_allclose(whole, x.astype(np.float64) @ a @ b, rtol=1e-4, atol=3e-3)
    for rows, length in ((1, 1), (4, 1), (2, 2), (4, 8), (1, 32)):
        found = np.asarray(update(x[:rows, :length], a[:rows], b[:rows]))
        assert found.tobytes() == whole[:rows, :length].tobytes(), (rows, length)
