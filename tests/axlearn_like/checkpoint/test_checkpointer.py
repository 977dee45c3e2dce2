import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.checkpoint.versions import CheckpointError
from tests.elsewhere import elsewhere


def make_state(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    params = {
        "layers": {"w": jnp.asarray(rng.normal(size=(4, 40, 30)), jnp.float32)},
        "head": jnp.asarray(rng.normal(size=(30, 7)), jnp.bfloat16),
    }
    return {
        "step": jnp.int32(seed),
        "params": params,
        "opt_state": {"optax": optax.adam(1e-3).init(params), "flag": jnp.asarray([True, False])},
    }


def abstract(state):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def save_steps(path: Path, steps: list[int], keep: int = 3) -> Checkpointer:
    checkpointer = Checkpointer.Config(save_every=2, keep=keep).build(directory=path)
    for step in steps:
        checkpointer.save(step, make_state(step), {"input": {"next_index": step}})
    checkpointer.wait()
    return checkpointer


def data_files(step: Path) -> list[Path]:
    return [p for p in (step / "params").rglob("*") if p.is_file() and p.stat().st_size > 5000]


def test_what_was_saved_comes_back_and_old_ones_go(tmp_path):
    checkpointer = save_steps(tmp_path, [2, 4, 6], keep=2)
    assert checkpointer.steps() == [4, 6]
    assert checkpointer.latest_step() == 6
    state, extras = checkpointer.restore(abstract(make_state()))
    assert_equal(state, make_state(6))
    assert extras == {"input": {"next_index": 6}}
    state, _ = checkpointer.restore(abstract(make_state()), step=4)
    assert_equal(state, make_state(4))
    checkpointer.close()
    assert [s for s in range(7) if checkpointer.should_save(s)] == [2, 4, 6]


def test_parameters_alone_from_a_run_a_folder_or_a_step(tmp_path):
    save_steps(tmp_path / "checkpoints", [2, 4]).close()
    for path, step in [("", 4), ("checkpoints", 4), ("checkpoints/2", 2)]:
        params = restore_params(tmp_path / path)
        assert_equal(params, jax.tree.map(np.asarray, make_state(step)["params"]))
    on_device = restore_params(tmp_path, abstract(make_state()["params"]))
    assert_equal(on_device, make_state(4)["params"])
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'nothing'} holds no checkpoint"):
        restore_params(tmp_path / "nothing")


@pytest.mark.slow
@pytest.mark.parametrize("harm", [pytest.param("truncate", marks=pytest.mark.full), "flip", "remove"])
def test_a_damaged_checkpoint_is_named_with_the_nearest_good_one(tmp_path, harm):
    checkpointer = save_steps(tmp_path, [2, 4, 6])
    for step in (4, 6):
        for path in data_files(tmp_path / str(step)):
            content = bytearray(path.read_bytes())
            if harm == "truncate":
                path.write_bytes(content[: len(content) // 2])
            elif harm == "flip":  # Orbax itself does not notice
                content[len(content) // 2] ^= 4
                path.write_bytes(content)
            else:
                path.unlink()
    with pytest.raises(CheckpointError) as error:
        checkpointer.restore(abstract(make_state()))
    assert f"checkpoint {tmp_path / '6'} is damaged" in str(error.value)
    assert "nearest older good step is 2" in str(error.value)
    assert "\n" not in str(error.value)
    state, _ = checkpointer.restore(abstract(make_state()), step=2)
    assert_equal(state, make_state(2))
    with pytest.raises(CheckpointError, match="4 is damaged"):
        restore_params(tmp_path / "4")


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_the_array(tmp_path):
    checkpointer = save_steps(tmp_path, [2])
    other = make_state()
    other["params"]["layers"] = {"v": other["params"]["layers"]["w"]}
    with pytest.raises(CheckpointError, match="no 'layers/v'; did you mean 'layers/w'"):
        checkpointer.restore(abstract(other))
    wider = make_state()
    wider["params"]["head"] = jnp.zeros((30, 8), jnp.bfloat16)
    with pytest.raises(CheckpointError, match=r"'head' has shape and dtype \(\[30, 7\], 'bfloat16'"):
        checkpointer.restore(abstract(wider))
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; there are steps 2"):
        checkpointer.restore(abstract(make_state()), step=3)


def test_a_save_that_cannot_begin_is_an_error(tmp_path):
    checkpointer = save_steps(tmp_path / "checkpoints", [2])
    os.rename(tmp_path / "checkpoints", tmp_path / "moved")
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match=f"could not write .* to {tmp_path / 'checkpoints'}"):
        checkpointer.save(4, make_state(4), {})


def test_a_save_that_fails_in_the_background_fails_the_next_call(tmp_path):
    """Files may not grow beyond 3000 bytes for a while: like a full disk."""
    checkpointer = save_steps(tmp_path, [2])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=f"could not write a checkpoint to {tmp_path}"):
            checkpointer.save(4, make_state(4), {})
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpointer.latest_step() == 2
    state, _ = checkpointer.restore(abstract(make_state()))
    assert_equal(state, make_state(2))


RESHARD = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.learner import Constant, Learner
from axlearn_like.training.step import init_state, make_train_step
from mesh import make_mesh, partition, shard_batch, to_named_sharding

def loss(params, batch):
    rows = partition("batch")[0]
    h = jnp.einsum("bd,df->bf", batch["x"], params["up"], out_sharding=P(rows, "tensor"))
    y = jnp.einsum("bf,fd->bd", h, params["down"], out_sharding=P(rows, None))
    value = jnp.sum(batch["weights"][:, None] * (y - batch["x"]) ** 2)
    return value, {"loss": value}

learner = Learner.Config(schedule=Constant.Config(lr=0.01)).build()
rng = np.random.default_rng(0)
up, down = rng.normal(size=(16, 8)), rng.normal(size=(8, 16))
x = rng.normal(size=(16, 16)).astype(np.float32)
batch = {"x": x, "weights": np.full(16, 1 / 16, np.float32)}

def begin(shape):
    mesh = make_mesh(shape)
    jax.set_mesh(mesh)
    def init():
        params = {
            "up": jnp.array(up, jnp.float32, out_sharding=P("fsdp", "tensor")),
            "down": jnp.array(down, jnp.float32, out_sharding=P("tensor", "fsdp")),
        }
        return init_state(params, learner)
    return to_named_sharding(jax.eval_shape(init), mesh), init

metrics = {}
checkpointer = Checkpointer.Config().build(directory=sys.argv[1])
abstract, init = begin({"fsdp": 4, "tensor": 2})
state = jax.jit(init, out_shardings=jax.tree.map(lambda a: a.sharding, abstract))()
for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
    assert leaf.sharding == wanted.sharding
for count in (1, 4):  # the second way of computing the first step
    copy = jax.tree.map(jnp.copy, state)
    after, m = make_train_step(loss, learner, count)(copy, shard_batch(batch))
    metrics[count] = {k: float(v) for k, v in m.items()}
for leaf, wanted in zip(jax.tree.leaves(after), jax.tree.leaves(abstract), strict=True):
    assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
np.testing.assert_allclose(metrics[1]["loss"], metrics[4]["loss"], rtol=1e-5)
np.testing.assert_allclose(metrics[1]["grad_norm"], metrics[4]["grad_norm"], rtol=1e-5)
step = make_train_step(loss, learner, 2)
state, _ = step(state, shard_batch(batch))
state, _ = step(state, shard_batch(batch))
assert step._cache_size() == 1
checkpointer.save(2, state, {"n": 1})
saved = jax.tree.map(np.asarray, state)
expected, _ = step(state, shard_batch(batch))
expected = np.asarray(expected["params"]["up"])

abstract, _ = begin({"data": 2, "fsdp": 2, "tensor": 2})
restored, extras = checkpointer.restore(abstract)
assert extras == {"n": 1}
jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, restored), saved)
for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True):
    assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
assert restored["params"]["up"].addressable_shards[0].data.shape == (8, 4)
again, _ = make_train_step(loss, learner, 2)(restored, shard_batch(batch))
np.testing.assert_allclose(np.asarray(again["params"]["up"]), expected, rtol=1e-5, atol=1e-6)
checkpointer.close()
print("resharded")
"""


@pytest.mark.slow
def test_a_checkpoint_moves_to_another_mesh(tmp_path):
    """Eight devices: fsdp 4 x tensor 2 -> data 2 x fsdp 2 x tensor 2; also accumulation on a mesh."""
    done = subprocess.run(
        [sys.executable, "-c", RESHARD, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.endswith("resharded\n"), done.stderr[-3000:]


def test_the_manifest_says_what_is_inside(tmp_path):
    save_steps(tmp_path, [2]).close()
    manifest = json.loads((tmp_path / "2" / "manifest" / "metadata").read_text())
    assert manifest["params"]["head"]["shape"] == [30, 7]
    assert manifest["params"]["head"]["dtype"] == "bfloat16"


def test_extras_that_were_changed_are_noticed(tmp_path):
    save_steps(tmp_path, [4, 6]).close()
    (path,) = [p for p in (tmp_path / "6" / "extras").rglob("*") if p.is_file() and b"next_index" in p.read_bytes()]
    path.write_bytes(path.read_bytes().replace(b"6", b"7"))
    with pytest.raises(CheckpointError, match=r"6 is damaged \(the content of .*extras does not match its digest"):
        save_steps(tmp_path, []).restore(abstract(make_state()))


def read_what_may_not_be_read(path: str, hidden: str) -> str:
    restore_params(path)  # everything is imported and readable
    os.chmod(hidden, 0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    with pytest.raises(CheckpointError) as caught:
        restore_params(path)
    return str(caught.value)


@pytest.mark.parametrize("item", ["params", "manifest", ""])
def test_files_that_may_not_be_read_are_not_called_damaged(item):
    with tempfile.TemporaryDirectory() as name:  # which everybody may enter, unlike tmp_path
        os.chmod(name, 0o755)
        save_steps(Path(name) / "steps", [2, 4]).close()
        subprocess.run(["chmod", "-R", "a+rX", name], check=True)
        newest = Path(name) / "steps" / "4"
        files = [p for p in (newest / item).rglob("*") if p.is_file() and (p.name == "metadata" or item == "params")]
        path = max(files, key=lambda p: p.stat().st_size) if item else newest.parent
        message = elsewhere(read_what_may_not_be_read, str(newest.parent), str(path))
        os.chmod(path, 0o755)
    assert "cannot be " in message and "\n" not in message
    assert "damaged" not in message and "elete" not in message


@pytest.mark.slow
def test_a_save_leaves_no_list_of_tensorstores_figures(tmp_path):
    """TensorStore would keep some 14 for each save: the trainer of a long run grew by 0.6 MiB a minute."""

    def held() -> int:
        gc.collect()
        lists = (o for o in gc.get_objects() if type(o) is list and len(o) == 1)
        return sum(type(o[0]) is dict and o[0].keys() == {"value"} for o in lists)

    checkpointer = Checkpointer.Config(save_every=1, keep=2).build(directory=tmp_path)
    found = []
    for step in (1, 2):
        checkpointer.save(step, make_state(step), {})
        checkpointer.wait()
        found.append(held())
    checkpointer.close()
    assert found[0] == found[1]
