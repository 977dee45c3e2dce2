"""A policy at an endpoint is evaluated as one of this process is: its answers, its episodes, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.tokenizers.protocol import answer_text
from mesh.errors import UserError
from rl.environments.environment import Consult, Environment, Row, Step
from rl.environments.task import EnvironmentTask
from rl.evaluation.samples import Samples
from rl.evaluation.served import ServedPolicy
from rl.protocol.messages import Prompt
from rl.rollout.request import Request
from rl.rollout.sampling import Sampler
from rl.tasks.encoding import encode_problem
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.columns import Columns
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from tests.rl.serving.running import MODEL, TOKENIZER, Running, make_engine, running
from tools.cli import main

SHORT = {"max_new_tokens": 6, "temperature": 0.0}


def questions() -> list[dict[str, str]]:
    return [{"prompt": f"q{n}", "long": f"a question of many tokens {n}", "answer": "x"} for n in range(3)]


def heard_three(problem_id: int, answer: str) -> float:
    return float(answer == "3 answers")


class Asking(Environment):
    """Two actions; the answer is how many others are drawn then."""

    class Config(Environment.Config):
        max_turns: int = 3
        verify: bool = True
        fails: bool = False

    def reset(self, row: Row) -> str:
        self._acted = 0
        return "?"

    async def step(self, action: str) -> Any:
        self._acted += 1
        if self.cfg.fails:  # pyright: ignore[reportAttributeAccessIssue]
            raise ValueError("no such row")
        return ("x", 0.5, False) if self._acted < 2 else Consult(None, "q", samples=3, max_new_tokens=2)

    def hear(self, answer: list[str]) -> Step:
        return Step(reward=0.25, done=True, answer=f"{len(answer)} answers")


ROWS = RowFunction.Config(function=questions)
LONG = Columns.Config(prompt="long", answer="answer")
PLAIN = TaskRows.Config(rows=ROWS, heldout=ROWS.clone(), label="q")


def asked(served: Running, family: Any = PLAIN, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
    tasks = TaskMixture.Config(families=(family,)).build()
    verifier = InlineVerifier.Config(scorer=FunctionScorer.Config(function=heard_three)).build()
    cfg = ServedPolicy.Config(**{"url": f"{served.url}/v1", "model": MODEL, **SHORT, **fields})
    cfg.check()
    return list(cfg.build(tasks=tasks, verifier=verifier).answers(tasks.for_evaluation(None, 0), count, 7))


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(make_engine(max_prompt_tokens=64)) as one:
        yield one


def test_greedy_answers_are_those_of_the_engine(served: Running) -> None:
    rows, tasks, engine = asked(served), TaskMixture.Config(families=(PLAIN,)).build(), make_engine()
    for row, problem in zip(rows, tasks.for_evaluation(None, 0), strict=True):
        prompt = Prompt(problem.id, problem.family, encode_problem(problem, TOKENIZER))
        stop: Any = engine.cfg.stop_tokens
        (rollout,) = engine.generate([Request(prompt, sampler=Sampler.Config(temperature=0.0))])
        tokens = rollout.tokens[: SHORT["max_new_tokens"]].tolist()
        text = answer_text(TOKENIZER, [one for one in tokens if one not in stop])
        assert (row["problem"], row["question"]) == (problem.id, problem.question)
        assert row["samples"][0]["answer"] == text


def test_samples_differ_and_come_again(served: Running) -> None:
    first, again = (asked(served, count=4, temperature=1.0) for _ in range(2))
    answers = [[one["answer"] for one in row["samples"]] for row in first]
    assert all(len(set(row)) > 1 for row in answers) and first == again


def test_an_episode_is_a_chat_and_the_environment_may_have_others_drawn(served: Running) -> None:
    rows = asked(served, EnvironmentTask.Config(source=PLAIN, environment=Asking.Config()), count=2)
    for row in rows:
        for sample in row["samples"]:
            assert (sample["reward"], sample["answer"], sample["status"]) == (1.75, "3 answers", "ok")
            assert [one["role"] for one in sample["messages"]] == ["user", "assistant", "user", "assistant"]
            assert [one["content"] for one in sample["messages"]][::2] == [row["question"] + "?", "x"]


def test_what_an_environment_does_wrong_is_no_reward(served: Running) -> None:
    (sample, *_) = asked(served, EnvironmentTask.Config(source=PLAIN, environment=Asking.Config(fails=True)))[0][
        "samples"
    ]
    assert (sample["status"], sample["reward"]) == ("error", 0.0) and "no such row" in sample["error"]
    short = EnvironmentTask.Config(source=PLAIN, environment=Asking.Config(max_turns=1))
    assert asked(served, short)[0]["samples"][0]["ended"] == "truncated"


def test_an_episode_that_has_no_room_is_truncated() -> None:
    with running(make_engine(max_prompt_tokens=8)) as small:
        (sample,) = asked(small, EnvironmentTask.Config(source=PLAIN, environment=Asking.Config()))[0]["samples"]
        assert (sample["ended"], sample["reward"], len(sample["messages"])) == ("truncated", 0.5, 3)
        with pytest.raises(UserError, match="1 to 8.*context_length_exceeded"):
            asked(small, TaskRows.Config(rows=ROWS, heldout=ROWS.clone(), label="long", columns=LONG))


def test_an_endpoint_that_refuses_is_named(served: Running) -> None:
    with pytest.raises(UserError, match=rf"{served.url}/v1: status 404: .*other"):
        asked(served, model="other")
    with pytest.raises(UserError, match="http://127.0.0.1:1/v1: no reply after 1 attempts"):
        asked(served, url="http://127.0.0.1:1/v1", attempts=1)


def test_the_command_takes_an_address(served: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions()))
    url, out = f"{served.url}/v1", tmp_path / "out"
    arguments = ["eval", url, "--tasks", f"mine={tmp_path / 'rows.jsonl'}", "--samples", "2", "--out", str(out)]
    assert main(arguments) == 2
    assert f"{url}: which model? expected --set model=NAME" in capsys.readouterr().err and not out.exists()
    assert main([*arguments, "--set", f"model={MODEL}", "--set", "max_new_tokens=6", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["problems"], result["samples"], result["policy"]) == (3, 6, f"{MODEL} at {url}")
    before = (out / "samples.jsonl").read_bytes()
    assert main([*arguments, "--set", f"model={MODEL}", "--set", "max_new_tokens=6"]) == 0
    assert (out / "samples.jsonl").read_bytes() == before
    assert main([*arguments, "--set", f"model={MODEL}", "--set", "max_new_tokens=7"]) == 2
    assert "holds an evaluation with max_new_tokens = 6, not 7" in capsys.readouterr().err
    others = ["--set", f"model={MODEL}", "--set", "max_new_tokens=6", "--set", "at_once=2", "--set", "timeout_s=99"]
    assert main([*arguments, *others]) == 0 and (out / "samples.jsonl").read_bytes() == before


def test_an_evaluation_without_answers_may_be_begun_otherwise(tmp_path: Path) -> None:
    Samples(tmp_path, {"seed": 0})
    samples = Samples(tmp_path, {"seed": 1})
    samples.append({"problem": 0})
    with pytest.raises(UserError, match="holds an evaluation with seed = 1, not 0"):
        Samples(tmp_path, {"seed": 0})
