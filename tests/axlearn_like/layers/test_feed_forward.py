import jax
import numpy as np
from flax import nnx

from axlearn_like.layers.base import bind, split
from axlearn_like.layers.feed_forward import SwiGLU
from tests.axlearn_like.layers import reference


def test_it_is_the_equation():
    graphdef, params = split(SwiGLU.Config(dim=12, hidden=20).build(rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(2, 3, 12)).astype(np.float32)
    y = jax.jit(lambda p, x: bind(graphdef, p)(x)[0])(params, x)
    expected = reference.feed_forward(reference.float64(params), x.astype(np.float64))
    np.testing.assert_allclose(y, expected, atol=1e-6)


def test_the_spread_begins_as_the_inputs_demand():
    _, params = split(SwiGLU.Config(dim=64, hidden=256).build(rngs=nnx.Rngs(0)))
    # Cut at two standard deviations, a normal distribution has 0.880 of its spread left.
    for name, inputs in (("gate_df", 64), ("up_df", 64), ("down_fd", 256)):
        assert abs(float(params[name].std()) * inputs**0.5 - 0.880) < 0.03
