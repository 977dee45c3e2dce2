"""`axl rl sweep`: fields and values on the command line, names and configs of policies, the plan, and refusals."""

from pathlib import Path

import pytest

from mesh import UserError
from rl.runtime.policies.configs import check_policies, policy_configs
from tests.rl.runtime.policies.tiny_policies import tiny_policies
from tools.cli import EXIT_USER_ERROR, main
from tools.experiment.sweep import plan_sheet, read_over, swept
from tools.report import load_run

FILE = """
from tests.rl.runtime.policies.tiny_policies import tiny_policies
from tests.rl.tiny import tiny_experiment


def lora():
    return tiny_policies({})


def whole():
    return tiny_experiment()
"""


def test_fields_and_values_are_read_as_they_stand():
    over = read_over(["learner.schedule.lr=1e-4, 3e-4", "seed=0,1", "betas=(0.9,0.99),(0.8,0.9)", "x='a,b',[1,2]"])
    assert over == {
        "learner.schedule.lr": ("1e-4", "3e-4"),
        "seed": ("0", "1"),
        "betas": ("(0.9,0.99)", "(0.8,0.9)"),
        "x": ("'a,b'", "[1,2]"),
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["seed"], "expected PATH=VALUE,VALUE"),
        (["seed="], "expected PATH=VALUE,VALUE"),
        (["=1,2"], "expected PATH=VALUE,VALUE"),
        (["seed=1,,2"], "expected PATH=VALUE,VALUE"),
        (["seed=1,2,1"], "expected values that differ"),
        (["seed=1", "seed=2"], "seed is swept twice"),
    ],
)
def test_what_cannot_be_read_is_refused(given: list[str], message: str):
    with pytest.raises(UserError, match=f"--over '.*{message}"):
        read_over(given)


@pytest.mark.slow
def test_policies_are_all_combinations_named_by_field_and_value():
    cfg = tiny_policies({})
    found = swept(cfg, read_over(["learner.schedule.lr=1e-4,3e-4", "seed=0,1,2"]))
    assert list(found) == [f"lr={lr}+seed={seed}" for lr in ("1e-4", "3e-4") for seed in range(3)]
    assert found["lr=3e-4+seed=1"] == {"learner.schedule.lr": "3e-4", "seed": "1"}
    made = policy_configs(cfg.set(policies=found))
    assert {(own.learner.schedule.lr, own.seed) for own in made.values()} == {  # type: ignore[attr-defined]
        (lr, seed) for lr in (1e-4, 3e-4) for seed in range(3)
    }
    assert len(check_policies(cfg, "inprocess")) == 6


def test_names_tell_fields_and_values_apart_and_are_names_of_folders():
    cfg = tiny_policies({})
    names = list(swept(cfg, read_over(["tasks.seed=1,2", "seed=3"])))
    assert names == ["tasks.seed=1+seed=3", "tasks.seed=2+seed=3"]
    names = list(swept(cfg, {"objective.old_policy": ("current",), "controller.long_prompts": ("skip", "'skip'")}))
    assert names == ["old_policy=current+long_prompts=skip", "old_policy=current+long_prompts=-skip-"]
    policy_configs(cfg.set(policies={name: {} for name in names}))  # names that are allowed
    prompts = {"tasks.families.0.name": ("spell_backward", "Spell_Backward")}
    assert list(swept(cfg, prompts)) == ["name=spell_backward", "name=spell_backward-2"]
    fields = [f"tasks.families.{n}.params" for n in (0, 1)]
    long = list(swept(cfg, {field: [f"{{'min_word_len': {n}}}" for n in (1, 2)] for field in fields}))
    assert len(set(long)) == 4 and all(len(name) <= 100 for name in long)
    policy_configs(cfg.set(policies={name: {} for name in long}))


def test_a_value_that_does_not_fit_names_its_field():
    cfg = tiny_policies({})
    with pytest.raises(UserError, match=r"--over learner.schedule.rate=1: .* has no field 'rate'"):
        swept(cfg, read_over(["learner.schedule.rate=1"]))
    with pytest.raises(UserError, match=r"--over seed=x: .*seed.*int"):
        swept(cfg, read_over(["seed=1,x"]))
    with pytest.raises(UserError, match="more than 256 combinations"):
        swept(cfg, {"seed": [str(n) for n in range(257)]})


def test_the_plan_shows_edits_updates_and_tokens_of_each():
    cfg = tiny_policies({"b": {"num_steps": 2, "seed": 5}, "a": {"learner.schedule.lr": 1e-4}})
    sheet = plan_sheet(cfg)
    assert sheet.heads == ("policy", "num_steps", "seed", "learner.schedule.lr", "updates", "tokens at most")
    assert sheet.rows == [("a", "", "", "0.0001", "4", "384"), ("b", "2", "5", "", "2", "192")]
    said = "2 policies of one base; engine.max_num_seqs=8 of their 32 answers a step are drawn at a time"
    assert sheet.title == said
    cfg.engine.max_num_seqs = 32
    assert plan_sheet(cfg).title == "2 policies of one base"


@pytest.mark.slow
def test_the_command_plans_and_refuses_with_what_to_add(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    place = tmp_path / "sweep.py"  # named as the command
    place.write_text(FILE)
    plan = [
        "rl",
        "sweep",
        f"{place}:lora",
        "--runtime",
        "inprocess",
        "--plan",
        "--over",
        "learner.schedule.lr=1e-3,1e-2",
    ]
    assert main(plan) == 0
    out = capsys.readouterr().out
    assert "2 policies of one base" in out and "lr=1e-3" in out and "trainer" in out
    assert main(["rl", "sweep", f"{place}:whole", *plan[3:]]) == 0
    assert "2 whole models" in capsys.readouterr().out
    for arguments, message in (
        ([f"{place}:lora"], "Missing option '--over'"),
        ([f"{place}:lora", "--over", "sed=1,2"], "did you mean 'seed'"),
        ([f"{place}:lora", "--over", "engine.max_num_seqs=1,2"], "all policies share 'engine'"),
        ([f"{place}:lora", "--over", "seed=1,2", "--export", "x"], "axl convert export RUN/policies/NAME DIR"),
        ([f"{place}:lore", "--over", "seed=1,2"], "did you mean 'lora'"),
    ):
        assert main(["rl", "sweep", *arguments, "--runtime", "inprocess"]) == EXIT_USER_ERROR
        assert message in capsys.readouterr().err
    assert main(["rl", f"{place}:lora", "--plan"]) == 0  # file named sweep.py is an experiment as any other
    assert "policies of one base" not in capsys.readouterr().out


@pytest.mark.full
def test_a_sweep_trains_each_names_the_one_that_failed_and_shows_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A learning rate of 1e30 makes weights that are no numbers, which drawing notices."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    place, run = tmp_path / "sweep.py", tmp_path / "run"
    place.write_text(FILE)
    edits = ["--set", "num_steps=2", "--set", "evaluation=None", "--over", "learner.schedule.lr=1e-2,1e30"]
    command = ["rl", "sweep", f"{place}:lora", "--runtime", "inprocess", "--quiet", "--run-dir", str(run), *edits]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert "2 policies, each a run in" in printed.out and "policy lr=1e30 failed: " in printed.err
    assert "are the policy's weights all numbers?" in printed.err and "policy lr=1e-2" not in printed.err
    loaded = {policy.path.name: policy for policy in load_run(run).policies}
    assert [row["step"] for row in loaded["lr=1e-2"].rows("rl")] == [1, 2] and len(loaded["lr=1e30"].rows("rl")) == 1
    assert "Reward of each policy" in (run / "report.html").read_text()
    assert (run / "policies" / "lr=1e-2" / "report.html").exists()
