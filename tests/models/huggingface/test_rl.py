"""RL of a policy that is a directory in Hugging Face's form: from the numbers of its file, by one update."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from axlearn_like.checkpoint.arrays import SavedParams
from axlearn_like.checkpoint.checkpointer import Checkpointer
from models.huggingface import hf
from models.huggingface.checkpoints.exporting import export_checkpoint
from models.huggingface.convert import by_name, from_huggingface
from tests.rl.tiny import tiny_experiment, tiny_params
from tests.rl.training.test_trainer import Roles


def export(folder: Path, cfg: Any) -> Path:
    """Write a model with random parameters, as a run's export is written; returns its directory."""
    saver = Checkpointer.Config(asynchronous=False).build(directory=folder / "checkpoints")
    saver.save(0, {"params": tiny_params(cfg), "step": np.int32(0)}, {})
    saver.close()
    export_checkpoint(SavedParams(folder / "checkpoints"), cfg, folder / "hf")
    return folder / "hf"


def test_the_first_engine_has_the_numbers_of_the_file_and_an_update_changes_them(tmp_path: Path):
    cfg = tiny_experiment(num_steps=1, evaluation=None)
    folder = export(tmp_path, cfg.policy)
    cfg.policy = hf(folder)
    file = by_name(from_huggingface(load_file(folder / "model.safetensors"), hf(folder)))

    roles = Roles.make(tmp_path / "run", cfg)
    assert roles.worker.run_once()  # with the weights that the trainer has published
    engine = roles.worker._engine
    assert engine.version == 0
    placed = by_name(engine.place(from_huggingface(load_file(folder / "model.safetensors"), hf(folder))).params)
    drawn_with = by_name(engine.runner.params)
    assert placed.keys() == drawn_with.keys()
    for name, array in placed.items():
        np.testing.assert_array_equal(drawn_with[name], array, err_msg=name)

    roles.advance(1)
    assert roles.trainer.step == 1
    trained = by_name(jax.device_get(roles.trainer.state["params"]))
    assert trained.keys() == file.keys()
    changed = [name for name, array in file.items() if not np.array_equal(array, trained[name])]
    assert {"embedding.weight_vd", "layers.attention.q_dkqh", "layers.feed_forward.down_fd"} <= set(changed)
    assert np.isfinite(roles.rows()[0]["loss"])
