"""The output of `axl config`."""

import pytest
from click.testing import CliRunner

from axlearn_like.config import ConfigError, from_text
from experiments import registry
from mesh.errors import UserError
from tests.axlearn_like.config.zoo import Model
from tools.commands import config

ZOO = "tests.axlearn_like.config.zoo"
HERE = "tests.tools.commands.test_config"


def plain() -> Model.Config:
    return Model.Config(dim=4, note="x" * 200)


def exact() -> Model.Config:
    return plain().set(mode="exact", extra="[bold]not markup[/bold]")


def exactly(cfg: Model.Config) -> None:
    cfg.set(mode="exact", note="a")


def printed(*words: str) -> str:
    """Return what `axl config` prints for a program that reads a pipe."""
    return CliRunner().invoke(config.command, words, catch_exceptions=False).output


def test_show_prints_the_text_that_parses_back():
    assert from_text(printed("show", f"{HERE}:exact")) == exact()


def test_show_applies_edits_in_order():
    edits = ["--set", "dim=5", "--set", "blocks.0.norm.eps=1e-3", "--set", "dim=6"]
    expected = plain().set(dim=6)
    expected.blocks[0].norm.eps = 1e-3
    assert from_text(printed("show", f"{HERE}:plain", *edits)) == expected


def test_show_applies_modifiers_before_edits():
    text = printed("show", f"{HERE}:plain", "--set", "note=b", "--apply", f"{HERE}:exactly")
    assert from_text(text) == plain().set(mode="exact", note="b")
    with pytest.raises(UserError, match="no modifier 'low_rnk'; did you mean 'low_rank'"):
        printed("show", f"{HERE}:plain", "--apply", "low_rnk")


def test_show_resolved_holds_no_required():
    text = printed("show", f"{HERE}:plain", "--set", "dim=7", "--resolved")
    assert "REQUIRED" not in text
    resolved = from_text(text)
    assert isinstance(resolved, Model.Config) and resolved.blocks[1].norm.dim == 7


def test_diff():
    extra = "  extra: None -> '[bold]not markup[/bold]'"
    assert printed("diff", f"{HERE}:plain", f"{HERE}:exact").splitlines() == [extra, "  mode: 'fast' -> 'exact'"]


def test_diff_of_the_same():
    assert "are the same" in printed("diff", f"{HERE}:plain", f"{HERE}:plain")


def test_list_names_every_experiment_each_on_a_line():
    text = printed("list")
    assert all(name in text for name in registry.entries())
    assert len(text.splitlines()) == 1 + len(registry.entries())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("trainer.microbatches=-1", r"trainer\.microbatches: expected 1 or more, got -1"),
        ("learner.clip_norm=-2.0", r"learner\.clip_norm: expected .*, got -2\.0"),
        ("engine.prefill_tokens=3", r"engine\.prefill_tokens: expected 64 or more, got 3"),
    ],
)
def test_show_resolved_refuses_values_that_cannot_be(edit: str, message: str):
    with pytest.raises(ConfigError, match=message):
        printed("show", "demo", "--set", edit, "--resolved")
    text = printed("show", "demo", "--set", edit)  # without it, the text is what was set
    assert edit.partition("=")[0] in text


def test_a_part_is_shown_alone():
    whole = printed("show", "demo_sft").splitlines()
    part = printed("show", "demo_sft", "learner.schedule").splitlines()
    assert (
        part == [line for line in whole if line.startswith(("learner.schedule:", "learner.schedule."))]
        and len(part) > 3
    )
    assert printed("show", "demo_sft", "learner.schedule.peak_lr").splitlines() == ["learner.schedule.peak_lr: 0.003"]
    for path, near in (("learner.shedule", "'learner.schedule'"), ("schedule", "'learner.schedule'")):
        with pytest.raises(UserError, match=f"demo_sft has no {path!r}; did you mean .*{near}"):
            printed("show", "demo_sft", path)


def test_diff_takes_edits():
    assert printed("diff", f"{HERE}:plain", "--set", "mode=exact").splitlines() == ["  mode: 'fast' -> 'exact'"]
    changed = printed("diff", "demo_sft", "demo_sft", "--apply", "low_rank", "--set", "num_steps=3")
    assert "+ learner.groups.0.frozen: False" in changed and "num_steps: " in changed
    with pytest.raises(UserError, match="expected another experiment, or --apply or --set"):
        printed("diff", "demo_sft")
