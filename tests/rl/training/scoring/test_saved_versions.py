"""Versions that a reference is reset to: kept when they are complete, beyond the trainer's own checkpoints."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.reader import restore_params
from mesh import UserError
from rl.training.scoring.saved_versions import SavedVersions


@pytest.mark.slow
def test_the_last_two_are_kept_and_one_that_is_gone_is_named(tmp_path: Path):
    checkpointer = Checkpointer.Config(keep=1).build(directory=tmp_path / "rl")
    versions = SavedVersions(tmp_path / "rl", tmp_path / "reference")
    assert not versions.keep(2)
    for step in (2, 4, 6):
        checkpointer.save(step, {"params": {"w": jnp.full(4, step)}, "step": jnp.int32(step)}, {})
        checkpointer.wait()
        assert versions.keep(step) and not versions.keep(step + 2)
    checkpointer.close()
    assert [path.name for path in (tmp_path / "rl").iterdir() if path.name.isdecimal()] == ["6"]
    assert sorted(path.name for path in (tmp_path / "reference").iterdir()) == ["4", "6"]
    np.testing.assert_array_equal(restore_params(versions.path(4))["w"], np.full(4, 4))
    shutil.rmtree(tmp_path / "reference")
    with pytest.raises(UserError, match=r"version 4, which the reference is reset to, is gone: .* has only 6; resume"):
        versions.keep(4)
