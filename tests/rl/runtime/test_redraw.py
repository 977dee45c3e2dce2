"""A rollout of a finished run is drawn again from its name and a version's weights, to the bit."""

import random
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.checkpoint.reader import restore_params
from rl.audit.comparison import first_difference, reward_difference
from rl.rollout.agent_loops.branching import Branching
from rl.rollout.agent_loops.interruption import Interruption
from rl.runtime.redraw import Redrawer
from tests.rl.runtime.recorded import run_recorded
from tests.rl.tiny import tiny_experiment

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "branching": {"branching": Branching.Config(at=(2, 4)), "samples_per_prompt": 8},
    "interruption": {"interruption": Interruption.Config(at=2, words="ab", until="ab", spread=1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["plain", "branching", pytest.param("interruption", marks=pytest.mark.full)])
def test_any_choice_of_rollouts_is_drawn_again_to_the_bit(feature: str, tmp_path: Path) -> None:
    cfg = tiny_experiment(num_steps=4, staleness=1, evaluation=None).set(**FEATURES[feature])
    cfg.trainer.checkpoint.set(save_every=1, keep=4)
    drawn = {name: group for name, group in run_recorded(tmp_path, cfg).items() if name.version}
    assert {name.version for name in drawn} == {1, 2}
    names = random.Random(0).sample(sorted(drawn), 11)

    def weights(version: int) -> Any:
        return restore_params(tmp_path / "checkpoints" / "rl" / str(version))

    redrawer = Redrawer(cfg.build())
    again = redrawer.draw(names, weights)
    assert sorted(again) == sorted(names)
    for name in names:
        one, other = drawn[name], again[name]
        assert one.hardware and one.hardware == other.hardware
        assert first_difference(one.rollouts[0], other.rollouts[0]) is None
        assert reward_difference(one.scores[0], other.scores[0]) is None
    # Under the weights of another version they are other rollouts.
    stale = redrawer.draw(names, lambda version: weights(3 - version))
    assert all(first_difference(drawn[name].rollouts[0], stale[name].rollouts[0]) for name in names)
