"""The features that exclude each other, by `axl config features`, and the page that lists them."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from axlearn_like.config import ConfigBase, ConfigError, walk_configs
from experiments import registry
from rl.objective import EntropyBonus
from rl.protocol.experiment import ExperimentFields, Feature
from tools.cli import cli
from tools.commands.config import command
from tools.features import FEATURES, exclusions, page, refusal, switched

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "features.md").read_text("utf-8")


class Nucleus(EntropyBonus):
    """A bonus that somebody adds, and that needs the whole distribution."""

    class Config(EntropyBonus.Config):
        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse a sampler that records candidates."""
            experiment.require("sampler", experiment.sampler.top_k is None, "top_k=None with Nucleus")


def test_a_new_feature_is_asked_though_the_experiment_does_not_know_it():
    cfg: Any = registry.get("demo")
    cfg.objective.regulariser = Nucleus.Config(coef=0.01)
    cfg.check_fields()
    changed = switched(cfg, "candidate tokens")
    with pytest.raises(ConfigError, match=r"^demo\.sampler: expected top_k=None with Nucleus, got RecordedSampler"):
        changed.check_fields()


def test_the_experiments_file_states_no_rule_of_a_part():
    source = (ROOT / "rl" / "experiment" / "config.py").read_text("utf-8")
    rules = source[source.index("def check_fields") :]
    parts = (
        "branching",
        "interruption",
        "demonstrations",
        "sampler",
        "objective",
        "trainer",
        "engine",
        "fleet",
        "server",
    )
    assert "part.requires(self)" in rules
    assert [part for part in parts if part in rules] == []


def test_every_part_that_needs_something_is_switched_on_by_a_feature():
    cfg, asked = registry.get("demo"), set[type]()
    for name in FEATURES:
        asked |= {type(part) for _, part in walk_configs(switched(cfg, name)) if isinstance(part, Feature)}
    stated = {one for one in _subclasses(ConfigBase) if "requires" in vars(one) and one.__module__.startswith("rl.")}
    assert len(stated) > 12
    assert {one.__qualname__ for one in stated if not any(issubclass(part, one) for part in asked)} == set()


def test_what_the_page_excludes_is_refused_in_these_words():
    cfg = registry.get("demo")
    reasons = PAGE.partition("## Reasons")[2]
    rows = re.findall(r"^\| ([^|]+) \| `+ ?([^|]+?) ?`+ \|$", reasons, re.MULTILINE)
    assert len(rows) > 15
    assert [(names, refusal(cfg, *names.split(" with "))) for names, _ in rows] == rows
    alone = {names for names, _ in rows if " with " not in names}
    assert {name for name in FEATURES if refusal(cfg, name) is not None} == alone


@pytest.mark.full
def test_the_page_is_what_the_command_writes():
    assert page(list(exclusions(registry.get("demo")))) == PAGE


def test_the_command_refuses_what_is_no_rl_experiment_and_shows_an_example():
    result = CliRunner().invoke(cli, ["config", "features", "--help"])
    assert "axl config features qwq_32b_rl" in result.output
    refused = CliRunner().invoke(command, ["features", "demo_sft"])
    assert "use `axl train`" in str(refused.exception)


def _subclasses(cls: type) -> set[type]:
    found = set(cls.__subclasses__())
    return found | {deeper for one in found for deeper in _subclasses(one)}
