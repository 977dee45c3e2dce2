"""The start of a run from another's parameters: read as they are, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.versions import CheckpointError
from axlearn_like.layers.base import split
from tests.axlearn_like.checkpoint.test_checkpointer import abstract
from tests.axlearn_like.tiny import tiny_model


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: split(tiny_model().build(rngs=nnx.Rngs(0)))[1])()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, params):
    """Runs that saved the parameters as they are, and in bfloat16."""
    root = tmp_path_factory.mktemp("runs")
    forms = {"whole": params, "half": jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)}
    for name, form in forms.items():
        checkpointer = Checkpointer.Config().build(directory=root / name / "checkpoints")
        checkpointer.save(1, {"params": form, "step": jnp.int32(1)}, {})
        checkpointer.close()
    return root


def start(path):
    return StartFrom.Config(path=str(path)).build()


@pytest.mark.slow
def test_parameters_are_those_that_were_saved(saved, params):
    found = start(saved / "whole").params(abstract(params))
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert a.dtype == b.dtype and a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_a_start_is_checked_by_a_process_without_devices(saved, params, monkeypatch):
    """Orbax's checkpointers open the devices, which the driver of an RL run has none of."""
    wanted = abstract(params)
    monkeypatch.setattr("orbax.checkpoint.Checkpointer", None)
    monkeypatch.setattr("jax._src.xla_bridge.backends", None)
    start(saved / "whole").check(wanted)
    with pytest.raises(CheckpointError, match="it has no 'layers/other'"):
        start(saved / "whole").check({**wanted, "layers": {**wanted["layers"], "other": wanted["norm"]["scale"]}})


def test_another_dtype_or_model_is_refused_by_name_and_path(saved, params):
    with pytest.raises(CheckpointError, match=r"'bfloat16'\), expected .*'float32'\)"):
        start(saved / "half").params(abstract(params))
    other = {**params, "embedding": jax.tree.map(lambda x: jnp.zeros((40, 16)), params["embedding"])}
    with pytest.raises(CheckpointError, match=f"checkpoint {saved / 'whole' / 'checkpoints' / '1'} .*'embedding/"):
        start(saved / "whole").params(abstract(other))
