"""Codecs whose error is chosen make another policy: an experiment has to say that it corrects for that."""

from typing import Any

import pytest

from axlearn_like.config import ConfigError, set_path
from rl.objective.importance import TruncatedImportance
from rl.objective.presets import grpo
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.training.scoring.logprob_diff import difference_bounds
from tests.rl.tiny import tiny_experiment


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        ("parameter_server.codec", "ecsq", "codec: .*ecsq needs an objective with importance"),
        ("engine.tiers", HostTiers.Config(codec="ecsq"), "objective.importance: .*of ecsq-pages"),
        ("engine.tiers", HostTiers.Config(codec="int8"), "objective.importance: .*of int8-pages"),
    ],
)
def test_an_experiment_without_correction_is_refused(path: str, value: Any, error: str):
    cfg = tiny_experiment()
    set_path(cfg, path, value)
    with pytest.raises(ConfigError, match=error):
        cfg.check("inprocess")
    cfg.objective = grpo().set(old_policy="current", importance=TruncatedImportance.Config())
    cfg.check("inprocess")


def test_exact_pages_need_none():
    cfg = tiny_experiment()
    cfg.engine.tiers = HostTiers.Config()
    cfg.check("inprocess")


def test_the_difference_of_such_weights_has_no_bound():
    assert difference_bounds("float32", "ecsq") == difference_bounds("float32", "hevc") == {}
    assert difference_bounds("float32", "int8") != {}
