"""`axl eval`: an untrained policy on rows of a file, resumed, compared; a supervised run; and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl.verification.sandbox.sandbox import Sandbox
from rl.verification.scorers import ReasoningGymScorer
from rl.verification.service import Verifier
from tests.rl.serving.test_policy import policy_params, save, supervised_run
from tests.rl.tiny import tiny_experiment, tiny_run
from tests.rl.verification.isolation import skip_without_isolation
from tools.cli import main

NAME = "tests.rl.tiny:tiny_experiment"


def rows(path: Path, count: int = 6) -> str:
    lines = [json.dumps({"prompt": f"q{n}", "answer": "a", "n": n}) + "\n" for n in range(count)]
    path.write_text("".join(lines) + json.dumps({"prompt": "a question that is too long", "answer": "a"}) + "\n")
    return str(path)


@pytest.mark.full
def test_a_policy_is_evaluated_on_rows_of_a_file_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, out = rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    arguments = ["eval", NAME, "--random-weights", "--tasks", f"mine={file}", "--samples", "2"]
    assert main([*arguments, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "mine: 6 problems; pass@1" in said.out and "maj@2" in said.out
    assert "1 problem of mine left out: have prompts longer than max_prompt_tokens" in said.err
    before = (out / "samples.jsonl").read_bytes()
    assert main([*arguments, "--out", str(out), "--json", "--against", str(out)]) == 0  # all is there: only read
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["compared"]["difference"] == 0.0 and result["problems"] == 6 and result["samples"] == 12
    assert (out / "samples.jsonl").read_bytes() == before
    assert main([*arguments, "--out", str(out), "--seed", "1"]) == 2
    assert "holds an evaluation with seed = 0, not 1" in capsys.readouterr().err
    rated = tmp_path / "rated.jsonl"
    difficulty = ["data", "difficulty", file, "--task", "mine", "--policy", NAME, "--random-weights", "--samples", "2"]
    assert main([*difficulty, "--out", str(rated)]) == 0
    found = [json.loads(line) for line in rated.read_text().splitlines()]
    assert [("pass_rate" in row, row.get("samples")) for row in found] == [(True, 2)] * 6 + [(False, None)]
    assert found[0]["n"] == 0


@pytest.mark.full
def test_published_tasks_have_their_own_verifiers(
    tmp_path: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]
):
    """Rows of GSM8K and HumanEval by one command: worked numbers compared, code run in the sandbox."""
    with Sandbox.Config().build() as sandbox:
        skip_without_isolation(sandbox)
    tasks = [f"gsm8k={shared_data}/gsm8k/test.jsonl.gz", f"humaneval={shared_data}/humaneval/HumanEval.jsonl.gz"]
    arguments = ["eval", NAME, "--random-weights", "--tasks", ",".join(tasks), "--problems", "2", "--samples", "2"]
    sizes = ["--set", "max_prompt_tokens=400"]
    assert main([*arguments, *sizes, "--out", str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: part["problems"] for name, part in result["families"].items()} == {"gsm8k": 2, "humaneval": 2}
    assert result["failed"] == {} and result["pass@1"] == 0.0 and "maj@2" in result["families"]["gsm8k"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(row["family"], len(row["samples"])) for row in rows] == [("gsm8k", 2)] * 2 + [("humaneval", 2)] * 2
    assert "####" in rows[0]["expected"] and rows[2]["question"].lstrip().startswith(("def ", "from ", "import "))
    assert "passed" in result["families"]["humaneval"]["terms"] and "terms" not in result["families"]["gsm8k"]


@pytest.mark.full
def test_a_supervised_run_is_evaluated_as_rl_evaluates_its_weights(tmp_path: Path) -> None:
    """The same answers to the same held-out problems, and so the same bytes."""
    rl: Any = tiny_experiment()
    rl.verifier = Verifier.Config(scorer=ReasoningGymScorer.Config(mixture=rl.tasks, pass_mark=1.0))
    with tiny_run(tmp_path / "rl", rl) as run:
        save(run.path / "warm_start" / "checkpoints", 3, policy_params(9))
    sizes = ["--problems", "3", "--samples", "4", "--set", "max_prompt_tokens=12", "--set", "max_new_tokens=6"]
    for name in (supervised_run(tmp_path / "sft"), tmp_path / "rl"):
        assert main(["eval", str(name), *sizes, "--out", str(tmp_path / f"eval_{name.name}")]) == 0
    one, other = (tmp_path / f"eval_{name}" / "samples.jsonl" for name in ("sft", "rl"))
    assert len(one.read_text().splitlines()) == 6 and one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "-k", "8", "--samples", "4"], "pass@8 needs --samples 8 or more; there are 4"),
        (["demmo"], "did you mean 'demo'"),
        (["no/such/folder"], "no directory no/such/folder"),
        (["demo", "--random-weights", "--tasks", "mine=nothing.jsonl"], "no file matches nothing.jsonl"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *arguments]) == 2
    assert message in capsys.readouterr().err
