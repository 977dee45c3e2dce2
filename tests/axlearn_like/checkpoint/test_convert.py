import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import Cast, StackLayers, StartFrom, UnstackLayers
from axlearn_like.checkpoint.versions import CheckpointError
from axlearn_like.layers.base import split
from tests.axlearn_like.checkpoint.test_checkpointer import abstract
from tests.axlearn_like.tiny import tiny_model


def tiny_params():
    return split(tiny_model().build(rngs=nnx.Rngs(0)))[1]


def listed(params):
    """The layers as a list, by numpy."""
    depth = len(jax.tree.leaves(params["layers"])[0])
    layers = {i: jax.tree.map(lambda x, i=i: jnp.asarray(np.asarray(x)[i]), params["layers"]) for i in range(depth)}
    return {**params, "layers": layers}


def cast(params, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), params)


@pytest.fixture(scope="module")
def params():
    return jax.jit(tiny_params)()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, params):
    """Runs that saved the parameters as they are, as a list, and as a list of bfloat16."""
    root = tmp_path_factory.mktemp("runs")
    forms = {"stack": params, "list": listed(params), "half": cast(listed(params), jnp.bfloat16)}
    for name, form in forms.items():
        checkpointer = Checkpointer.Config().build(directory=root / name / "checkpoints")
        checkpointer.save(1, {"params": form, "step": jnp.int32(1)}, {})
        checkpointer.close()
    return root


def restored(path, wanted, *conversions):
    return StartFrom.Config(path=str(path), conversions=conversions).build().params(abstract(wanted))


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_list_of_layers_becomes_a_stack_and_back(saved, params):
    assert_same(restored(saved / "stack", params), params)
    assert_same(restored(saved / "list", params, StackLayers.Config()), params)
    assert_same(restored(saved / "stack", listed(params), UnstackLayers.Config()), listed(params))


def test_a_start_is_checked_by_a_process_without_devices(saved, params, monkeypatch):
    """Orbax's checkpointers open the devices, which the driver of an RL run has none of."""
    wanted = abstract(params)
    monkeypatch.setattr("orbax.checkpoint.Checkpointer", None)
    monkeypatch.setattr("jax._src.xla_bridge.backends", None)
    StartFrom.Config(path=str(saved / "stack")).build().check(wanted)
    with pytest.raises(CheckpointError, match="it has no 'layers/attention/k_dkh'"):
        StartFrom.Config(path=str(saved / "list")).build().check(wanted)


def test_conversions_follow_each_other(saved, params):
    half = cast(params, jnp.bfloat16)
    widen = Cast.Config(saved="bfloat16", wanted="float32")
    assert_same(restored(saved / "half", params, widen, StackLayers.Config()), cast(half, jnp.float32))
    assert_same(restored(saved / "half", params, StackLayers.Config(), widen), cast(half, jnp.float32))
    narrow = Cast.Config(saved="float32", wanted="bfloat16")
    assert_same(restored(saved / "stack", listed(half), narrow, UnstackLayers.Config()), listed(half))


def test_nothing_is_converted_that_was_not_asked_for(saved, params):
    with pytest.raises(CheckpointError, match=f"{saved / 'list'}.* it has no 'layers/attention/k_dkh'"):
        restored(saved / "list", params)
    with pytest.raises(CheckpointError, match=r"'bfloat16'\), expected .*'float32'\)"):
        restored(saved / "half", params, StackLayers.Config())
    with pytest.raises(CheckpointError, match="UnstackLayers: 'layers' of this model is not a list of layers"):
        restored(saved / "stack", params, UnstackLayers.Config())
    with pytest.raises(CheckpointError, match="this model has no 'blocks'; it has embedding, layers, norm"):
        restored(saved / "stack", params, StackLayers.Config(key="blocks"))


def test_another_model_is_refused_by_name_and_path(saved, params):
    other = {**params, "embedding": jax.tree.map(lambda x: jnp.zeros((40, 16)), params["embedding"])}
    with pytest.raises(CheckpointError, match=f"checkpoint {saved / 'stack' / 'checkpoints' / '1'} .*'embedding/"):
        restored(saved / "stack", other)
