"""The output of `axl config`."""

import io

import pytest
from rich.console import Console

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


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=60)


def test_show_prints_the_text_that_parses_back(console: Console):
    config.show(f"{HERE}:exact", console=console)
    assert from_text(printed(console)) == exact()


def test_show_applies_edits_in_order(console: Console):
    config.show(f"{HERE}:plain", ["dim=5", "blocks.0.norm.eps=1e-3", "dim=6"], console=console)
    expected = plain().set(dim=6)
    expected.blocks[0].norm.eps = 1e-3
    assert from_text(printed(console)) == expected


def test_show_applies_modifiers_before_edits(console: Console):
    config.show(f"{HERE}:plain", ["note=b"], console=console, applied=[f"{HERE}:exactly"])
    assert from_text(printed(console)) == plain().set(mode="exact", note="b")
    with pytest.raises(UserError, match="no modifier 'low_rnk'; did you mean 'low_rank'"):
        config.show(f"{HERE}:plain", applied=["low_rnk"])


def test_show_resolved_holds_no_required(console: Console):
    config.show(f"{HERE}:plain", ["dim=7"], resolved=True, console=console)
    text = printed(console)
    assert "REQUIRED" not in text
    resolved = from_text(text)
    assert isinstance(resolved, Model.Config) and resolved.blocks[1].norm.dim == 7


def test_diff(console: Console):
    config.diff(f"{HERE}:plain", f"{HERE}:exact", console=console)
    extra = "  extra: None -> '[bold]not markup[/bold]'"
    assert printed(console).splitlines() == [extra, "  mode: 'fast' -> 'exact'"]


def test_diff_of_the_same(console: Console):
    config.diff(f"{HERE}:plain", f"{HERE}:plain", console=console)
    assert "are the same" in printed(console)


def test_list_names_every_experiment(console: Console):
    config.list_experiments(console=console)
    text = printed(console)
    assert all(name in text for name in registry.entries())


def test_list_keeps_an_experiment_on_a_line_when_piped(capsys: pytest.CaptureFixture[str]):
    config.list_experiments()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(registry.entries())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("trainer.microbatches=-1", r"trainer\.microbatches: expected 1 or more, got -1"),
        ("learner.clip_norm=-2.0", r"learner\.clip_norm: expected .*, got -2\.0"),
        ("engine.prefill_tokens=3", r"engine\.prefill_tokens: expected 64 or more, got 3"),
    ],
)
def test_show_resolved_refuses_values_that_cannot_be(edit: str, message: str, console: Console):
    with pytest.raises(ConfigError, match=message):
        config.show("demo", [edit], resolved=True, console=console)
    config.show("demo", [edit], console=console)  # without it, the text is what was set
    assert edit.partition("=")[0] in printed(console)
