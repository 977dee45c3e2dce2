"""Answers that a run keeps for people to read as it trains."""

from pathlib import Path

import numpy as np

from axlearn_like.run.metrics import read_rows
from axlearn_like.tokenizers.bytes import ByteTokenizer
from rl.controller.samples import SampleLog
from rl.protocol.messages import Group, Prompt
from tests.rl.controller.scripted import Clock
from tests.rl.tiny import make_group


def group(question: str, answers: dict[str, float]) -> Group:
    tokens = np.frombuffer(question.encode(), np.uint8).astype(np.int32)
    return make_group(Prompt(7, "sums", tokens), [list(a.encode()) for a in answers], list(answers.values()), version=3)


def test_the_first_answers_of_some_updates_are_kept(tmp_path: Path):
    clock, tokenizer = Clock(), ByteTokenizer.Config().build()
    log, path = SampleLog(tmp_path, tokenizer, clock), tmp_path / "rl.jsonl"
    groups = [group("1+1", {"2": 1.0, "3": 0.0}), group("2+2", {"\x1b[2J5": 0.0}), group("3+3", {"6": 1.0})]
    log.observe(4, groups)
    clock.now += 4.9
    log.observe(5, groups)  # too soon
    rows = read_rows(path)
    found = [(row["phase"], row["step"], row["question"], row["answer"], row["reward"], row["version"]) for row in rows]
    assert found == [("rl", 4, "1+1", "2", 1.0, 3), ("rl", 4, "2+2", "\x1b[2J5", 0.0, 3)]
    clock.now += 0.2
    log.observe(6, groups)
    assert [row["step"] for row in read_rows(path)] == [4, 4, 6, 6]


def test_a_long_run_keeps_a_bounded_number_of_bounded_answers(tmp_path: Path):
    clock, tokenizer = Clock(), ByteTokenizer.Config().build()
    log = SampleLog(tmp_path, tokenizer, clock)
    for step in range(20_000):  # a day of updates of 4.3 s
        log.observe(step, [group("?" * 9000, {"x" * 9000: 0.5})] if step < 2 else [group("?", {"!": 0.5})])
        clock.now += 4.3
    rows = read_rows(tmp_path / "rl.jsonl")
    assert len(rows[0]["answer"]) < 4100 and rows[0]["question"].endswith("(5000 more characters)")
    assert 300 < len(rows) < 900
