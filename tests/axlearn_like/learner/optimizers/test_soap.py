"""SOAP is its paper's algorithm, for every matrix of a stack by itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axlearn_like.config import config_for
from axlearn_like.learner import Matrices, Matrixwise, scale_by_soap

pytestmark = pytest.mark.numerics

B1, B2, EPS, EVERY = 0.9, 0.95, 1e-8, 3


def gradients(seed: int, count: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    scale = np.linspace(0.2, 3.0, shape[-2])[:, None]  # eigenvalues that are well apart
    return [scale * rng.normal(size=shape) for _ in range(count)]


def algorithm(grads: list[np.ndarray], left: bool = True) -> list[np.ndarray]:
    """Algorithms 3 and 4 of arXiv 2409.11321 in float64; `left` False: no basis for rows."""
    (m, n), made = grads[0].shape, []
    first, second, lq, rq = np.zeros((m, n)), np.zeros((m, n)), np.eye(m), np.eye(n)
    ll, rr = np.zeros((m, m)), np.zeros((n, n))
    for t, g in enumerate(grads):
        ll, rr = B2 * ll + (1 - B2) * g @ g.T, B2 * rr + (1 - B2) * g.T @ g
        if t == 0:
            lq, rq = (np.linalg.eigh(ll)[1] if left else lq), np.linalg.eigh(rr)[1]
            made.append(np.zeros((m, n)))
            continue
        first, second = B1 * first + (1 - B1) * g, B2 * second + (1 - B2) * (lq.T @ g @ rq) ** 2
        mean, square = lq.T @ first @ rq / (1 - B1**t), second / (1 - B2**t)
        made.append(lq @ (mean / (np.sqrt(square) + EPS)) @ rq.T)
        if t % EVERY == 0:
            if left:
                order = np.argsort(-np.diag(lq.T @ ll @ lq))
                lq, second = np.linalg.qr(ll @ lq[:, order])[0], second[order]
            order = np.argsort(-np.diag(rq.T @ rr @ rq))
            rq, second = np.linalg.qr(rr @ rq[:, order])[0], second[:, order]
    return made


def updates(direction: optax.GradientTransformation, grads: list[Any], params: Any) -> list[Any]:
    state, made = direction.init(params), []
    step = jax.jit(direction.update)
    for g in grads:
        update, state = step(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), g), state, params)
        made.append(jax.tree.map(np.asarray, update))
    return made


@pytest.mark.parametrize("largest", [10_000, 5])
def test_updates_are_those_of_the_paper(largest):
    grads = gradients(0, 11, (6, 5) if largest == 5 else (5, 5))
    made = updates(scale_by_soap(B1, B2, EPS, EVERY, largest), grads, jnp.zeros(grads[0].shape))
    for ours, theirs in zip(made, algorithm(grads, left=largest > 5), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_a_stack_is_updated_as_its_matrices_and_turns_bases_only_when_it_is_time():
    direction = config_for(scale_by_soap, b1=B1, b2=B2, eps=EPS, every=EVERY)
    whole = Matrixwise.Config(direction=direction, matrices=Matrices.Config()).build().transformation()
    stacks = gradients(1, 5, (3, 5, 5))
    params = {"up_df": jnp.zeros((3, 5, 5))}
    made = updates(whole, [{"up_df": g} for g in stacks], params)
    for layer in range(3):
        for ours, theirs in zip(made, algorithm([g[layer] for g in stacks]), strict=True):
            np.testing.assert_allclose(ours["up_df"][layer], theirs, atol=2e-3)
    state = whole.init(params)
    text = str(jax.make_jaxpr(whole.update)(params, state, params))
    assert text.count("cond[") == 2, "one for the whole stack, neither turned into a selection of both results"
