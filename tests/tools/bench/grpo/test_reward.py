"""Steps to a peer's reward: the arithmetic, and that all systems start from one file of weights."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from axlearn_like.layers.base import split
from tools.bench.grpo import reward as bench
from tools.bench.grpo.job import GrpoJob
from tools.bench.grpo.ours import experiment_config
from tools.cli import EXIT_USER_ERROR, main


def line(first: float, last: float, steps: int) -> list[float]:
    return np.linspace(first, last, steps).tolist()


def test_steps_are_counted_to_the_reward_that_the_peer_ends_with() -> None:
    fast, slow = line(0.01, 1.91, 20), line(0.01, 0.96, 20)  # 0.1 and 0.05 a step
    result = bench.summarise([{"ours": fast, "trl": slow, "tunix": fast}, {"ours": slow, "tunix": fast}])
    # The last five of the slow one have the mean 0.86; of the fast one 0.71, ..., 1.11 have 0.91, its steps 8 to 12.
    assert result["steps_to_level"]["trl"] == [{"level": pytest.approx(0.86), "ours": 12, "peer": 20}]
    assert [found["ours"] for found in result["steps_to_level"]["tunix"]] == [20, None]
    assert result["no_more_steps"] == {"trl": True, "tunix": False}
    assert result["steps_to"]["0.5"] == {"ours": [8, 13], "trl": [13], "tunix": [8, 8]}
    assert result["steps_to"]["0.95"] == {"ours": [13, None], "trl": [None], "tunix": [13, 13]}
    assert result["reward_last"]["trl"] == pytest.approx(0.86)
    assert result["reward_first"] == {"ours": [0.01, 0.01], "trl": [0.01], "tunix": [0.01, 0.01]}
    assert json.loads(json.dumps(result)) == result


def test_without_ours_or_a_peer_nothing_is_compared() -> None:
    rewards = line(0.0, 1.0, 6)
    for curves in ([{"ours": rewards}], [{"trl": rewards}], [{}]):
        result = bench.summarise(curves)
        assert result["steps_to_level"] == result["no_more_steps"] == {}


@pytest.mark.full
def test_the_file_has_the_weights_of_the_seed_and_ours_starts_from_it(tmp_path: Path) -> None:
    folder = bench.write_weights(tmp_path, 3)
    cfg = experiment_config(GrpoJob(seed=3), str(folder))
    _, params = jax.jit(lambda: split(cfg.policy.build(rngs=nnx.Rngs(3))))()
    read = load_file(folder / "model.safetensors")
    assert np.array_equal(read["model.embed_tokens.weight"], np.asarray(params["embedding"]["weight_vd"]))
    assert sum(tensor.size for tensor in read.values()) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert cfg.start_from is not None and cfg.start_from.path == str(folder) and cfg.seed == 3


def test_an_unknown_peer_is_refused_before_anything_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "grpo_reward", "--peers", "trl,tunics"]) == EXIT_USER_ERROR
    assert "no peer 'tunics'; did you mean 'tunix'" in capfd.readouterr().err
