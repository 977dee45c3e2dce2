"""Runs in notebooks: what a cell gets back, callbacks row by row, resuming, configs and plots as markup."""

from pathlib import Path

import pytest

from axlearn_like.learner import AdamW, Learner, WarmupLinear
from mesh import UserError
from tests.rl.tiny import tiny_experiment
from tools.notebook import FinishedRun, plot_rows, run


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


def test_another_config_is_refused_in_its_directory_and_what_cannot_be_run_is_named(tmp_path: Path):
    assert FinishedRun(tmp_path, True).metrics == [] == FinishedRun(tmp_path, True).samples
    (tmp_path / "config.txt").write_text("another\n")
    with pytest.raises(UserError, match="holds a run of another config"):
        run(tiny_experiment(), tmp_path)
    with pytest.raises(UserError, match="which `axl train` does not run"):
        run(AdamW.Config(), tmp_path)


def test_a_config_is_a_tree_of_fields_in_markup():
    text = Learner.Config(optimizer=AdamW.Config(b2=0.5), schedule=WarmupLinear.Config(peak_lr=1.0))._repr_html_()
    assert "<b>Learner</b>" in text and "optimizer: <b>AdamW</b>" in text and "b2 = 0.5" in text
    assert text.count("<details") == text.count("</details>")
    assert "&lt;" not in tiny_experiment()._repr_html_().replace("&lt;function", "")


def test_figures_are_plotted_without_a_window():
    assert "data:image/png;base64," in plot_rows([{"step": 1, "a": 2.0}, {"step": 2, "b": 1.0}], ["a", "b"])
