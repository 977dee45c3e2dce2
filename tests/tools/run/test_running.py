"""Runs of scripts and notebooks: what they get back, callbacks row by row, interrupts, resuming, refusals, policies."""

import doctest
import signal
from pathlib import Path
from typing import Any

import pytest

import tools.run
from axlearn_like.config import get_path
from axlearn_like.learner import AdamW, Learner, WarmupLinear
from mesh import UserError
from tests.rl.tiny import tiny_experiment
from tools.run import FinishedRun, load_policy, plot_rows, run

TINY = "tests.rl.tiny:tiny_experiment"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.full
def test_a_run_returns_its_rows_and_a_second_call_returns_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows: list[dict[str, object]] = []
    cfg = tiny_experiment(num_steps=2)
    done = run(cfg, tmp_path / "run", on_step=rows.append)
    assert done.finished and [row["step"] for row in rows] == [1, 2]
    assert [row["step"] for row in done.metrics] == [1, 2]
    assert done.series("reward", "rl") == [row["reward"] for row in rows] and done.series("loss", "sft") == []
    assert {"eval_before", "eval_after"} <= {row["phase"] for row in done.samples}
    assert done.compare()._repr_html_().count("<tr>") > 1
    said = capsys.readouterr().out
    assert "run directory" in said
    again: list[dict[str, object]] = []
    assert run(cfg, tmp_path / "run", on_step=[again.append], quiet=True).metrics == done.metrics
    assert again == [] and capsys.readouterr().out == ""
    assert done.report()._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')


@pytest.mark.slow
def test_an_experiment_by_name_is_edited_interrupted_resumed_and_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    """The directory is that of the command line; one Ctrl-C ends the run after the update in hand."""

    def interrupt(row: dict[str, Any]) -> None:
        if row["step"] == 1:
            signal.raise_signal(signal.SIGINT)

    def greedy(cfg: Any) -> None:
        cfg.set(evaluation=None)

    fields: Any = {"sets": {"num_steps": 3, "learner.schedule.lr": "2e-2"}, "apply": [greedy]}
    stopped = run(TINY, on_step=interrupt, **fields)
    assert not stopped.finished and stopped.path == folder / "runs" / "tiny_experiment"
    assert len(stopped.metrics) < 3 and "stopped by SIGINT" in capsys.readouterr().out
    assert stopped.config is not None and get_path(stopped.config, "learner.schedule.lr") == 2e-2
    done = run(TINY, **fields)
    assert done.finished and [row["step"] for row in done.metrics] == [1, 2, 3]
    run(TINY, **fields)
    assert "finished before, at update 3" in capsys.readouterr().out
    with pytest.raises(UserError, match="holds a run of another config"):
        run(TINY, sets={"num_steps": 5})
    policy = done.policy()
    answers = policy.generate(["2 + 3", "4"], samples=2, temperature=0.0)
    assert len(answers) == 4 and answers[0] == answers[1]  # greedy
    assert load_policy(done.path).generate("2 + 3", temperature=0.0) == answers[:1]
    assert all(len(answer) <= 2 for answer in policy.generate("2 + 3", samples=3, max_new_tokens=2))
    with pytest.raises(UserError, match="12"):
        policy.generate("longer than the experiment has room for")


def test_what_cannot_be_run_is_named_as_on_the_command_line(folder: Path):
    assert FinishedRun(folder).metrics == [] == FinishedRun(folder).samples
    (folder / "config.txt").write_text("another\n")
    with pytest.raises(UserError, match="holds a run of another config"):
        run(tiny_experiment(), folder)
    with pytest.raises(UserError, match="which `axl train` does not run"):
        run(AdamW.Config())
    with pytest.raises(UserError, match="no experiment 'demoo'; did you mean 'demo"):
        run("demoo")
    with pytest.raises(UserError, match=r"learner\.schedule.*did you mean 'lr'"):
        run(TINY, sets={"learner.schedule.l": 1.0})
    with pytest.raises(UserError, match="no modifier 'low_rnk'; did you mean 'low_rank'"):
        run(TINY, apply=["low_rnk"])
    with pytest.raises(UserError, match="a config has its own"):
        run(tiny_experiment(), seed=1)
    with pytest.raises(UserError, match="has no run in"):
        load_policy("demo")
    assert not (folder / "runs").exists()


@pytest.mark.full
def test_the_example_of_the_docstring_runs(folder: Path):
    """Supervised, by name; its policy is asked as a server would ask it."""
    assert doctest.testmod(tools.run).failed == 0
    assert (folder / "runs" / "demo_sft" / "config.txt").is_file()


def test_a_config_is_a_tree_of_fields_in_markup():
    text = Learner.Config(optimizer=AdamW.Config(b2=0.5), schedule=WarmupLinear.Config(peak_lr=1.0))._repr_html_()
    assert "<b>Learner</b>" in text and "optimizer: <b>AdamW</b>" in text and "b2 = 0.5" in text
    assert text.count("<details") == text.count("</details>")
    assert "&lt;" not in tiny_experiment()._repr_html_().replace("&lt;function", "")


@pytest.mark.slow
def test_figures_are_plotted_without_a_window():
    assert "data:image/png;base64," in plot_rows([{"step": 1, "a": 2.0}, {"step": 2, "b": 1.0}], ["a", "b"])
