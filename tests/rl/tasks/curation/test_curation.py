"""Curation keeps and removes what it says, for the reasons that it says, and writes whole files or none."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rl.tasks.curation.checks import Duplicates
from rl.tasks.curation.words import grams, words
from rl.tasks.heldout import is_heldout
from tools.cli import main

LONG = "Tom has {} red apples and gives half of them to his friend Ann, how many apples does Tom have after that day?"


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.splitlines()]


def run(*arguments: object) -> int:
    return main(["data", *map(str, arguments)])


def test_filter_names_the_first_condition_that_a_row_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows: list[dict[str, Any]] = [
        {"prompt": "a good question", "answer": "4", "pass_rate": 0.5},
        {"prompt": "abc", "answer": "4", "pass_rate": 0.5},
        {"prompt": "a question that is far too long", "answer": "4", "pass_rate": 0.5},
        {"prompt": "a good question", "answer": "", "pass_rate": 0.5},
        {"prompt": "a good question", "answer": "four", "pass_rate": 0.5},
        {"prompt": "see http://x", "answer": "4", "pass_rate": 0.5},
        {"prompt": "a good question", "answer": "4", "pass_rate": 1},
        {"prompt": "a good question", "answer": "4"},
    ]
    conditions = ["--shortest", 5, "--longest", 20, "--require", "answer", "--match", r"answer=^\d+$", "--drop"]
    out, removed = tmp_path / "out.jsonl.gz", tmp_path / "gone.jsonl"
    file = write(tmp_path / "in.jsonl", rows)
    more = ["prompt=https?://", "--between", "pass_rate=0.1..0.9", "--out", out, "--removed", removed]
    assert run("filter", file, *conditions, *more) == 0
    assert read(out) == rows[:1]
    reasons = ["too short", "too long", "missing field", "no match", "matched", "out of bounds", "no number"]
    assert [row["removed"][0] for row in read(removed)] == reasons
    assert [row["where"] for row in read(removed)] == [f"{file}, line {n}" for n in range(2, 9)]
    report = json.loads((tmp_path / "out.jsonl.gz.report.json").read_text())
    assert (report["read"], report["kept"]) == (8, 1) and report["removed"] == dict.fromkeys(reasons, 1)
    assert report["examples"]["matched"][0]["detail"] == "prompt has 'http://'"
    assert "1 of 8 rows" in capsys.readouterr().out
    before = out.read_bytes()
    assert run("filter", file, "--shortest", 500, "--out", out) == 2  # nothing would be left
    assert run("filter", file, "--field", "promt", "--out", out) == 2
    assert "did you mean 'prompt'" in capsys.readouterr().err
    assert out.read_bytes() == before and not list(tmp_path.glob("*.tmp"))


def test_conditions_on_one_field_all_hold(tmp_path: Path):
    rows = [{"prompt": text, "rate": rate} for text, rate in (("a b", 0.5), ("a", 0.5), ("b", 0.5), ("a b c", 0.9))]
    file, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert run("filter", file, "--match", "prompt=a", "--match", "prompt=b", "--out", out) == 0
    assert read(out) == [rows[0], rows[3]]
    assert run("filter", file, "--drop", "prompt=c", "--drop", "prompt=^b", "--out", out) == 0
    assert read(out) == rows[:2]
    assert run("filter", file, "--between", "rate=0.6..1", "--between", "rate=0..1", "--out", out) == 0
    assert read(out) == rows[3:]


def test_duplicates_are_found_beyond_case_and_punctuation_and_near_ones_by_their_words(tmp_path: Path):
    texts = [
        LONG.format(8),
        LONG.format(8).upper() + "!",
        LONG.format(8) + " Say it.",
        LONG.format(9),
        "short",
        "Short.",
    ]
    file, out = write(tmp_path / "in.jsonl", [{"prompt": text} for text in texts]), tmp_path / "out.jsonl"
    assert run("dedup", file, "--out", out, "--threshold", 0.85) == 0
    assert [row["prompt"] for row in read(out)] == [texts[0], texts[3], "short"]
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["removed"] == {"duplicate": 2, "near duplicate": 1}
    assert report["examples"]["near duplicate"][0]["detail"].endswith(f"of {file}, line 1")
    assert run("dedup", file, "--out", out, "--threshold", 0.7) == 0
    assert len(read(out)) == 2  # another number is another problem, unless one asks for less


def test_banded_signatures_find_what_comparing_all_pairs_finds():
    import random

    chance = random.Random(0)
    vocabulary = [f"w{n}" for n in range(60)]
    texts: list[list[str]] = []
    for _ in range(60):
        base = [chance.choice(vocabulary) for _ in range(40)]
        texts.append(base)
        texts.append([word if chance.random() > 0.03 else "changed" for word in base])
    check, kept = Duplicates(field="t", threshold=0.7), list[int]()
    found = [check({"t": " ".join(text)}, str(n)) is None for n, text in enumerate(texts)]
    sets = [set(grams(words(" ".join(text)), 3).tolist()) for text in texts]
    for n, mine in enumerate(sets):
        if all(len(mine & sets[m]) / len(mine | sets[m]) < 0.7 for m in kept):
            kept.append(n)
    assert [n for n, stays in enumerate(found) if stays] == kept and 60 <= len(kept) < 115


def test_rows_that_hold_an_evaluations_question_are_removed(tmp_path: Path):
    question = LONG.format("twelve")
    test = write(tmp_path / "test.jsonl", [{"question": question}, {"question": "What is 2 + 2?"}])
    rows = ["Here it is: " + question.lower() + " Good luck.", "what is 2+2", LONG.format("ten"), "What is 2 + 3?"]
    rows.append(" ".join(question.split()[:10]) + " and then something else is asked about pears and cherries")
    file, out = write(tmp_path / "in.jsonl", [{"prompt": text} for text in rows]), tmp_path / "out.jsonl"
    assert run("decontaminate", file, "--against", f"mine={test}", "--out", out) == 0
    assert [row["prompt"] for row in read(out)] == rows[3:]
    details = [
        e["detail"] for e in json.loads((tmp_path / "out.jsonl.report.json").read_text())["examples"]["contaminated"]
    ]
    assert details[0] == f"100 % of mine: {test}, line 1" and details[1] == f"the whole of mine: {test}, line 2"
    assert run("decontaminate", file, "--against", f"mine={test}", "--out", out, "--share", 0.9) == 0
    assert [row["prompt"] for row in read(out)] == rows[2:]


def test_questions_of_several_files_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = (write(tmp_path / f"{name}.jsonl", [{"question": name}]) for name in ("one", "two"))
    file, out = (
        write(tmp_path / "in.jsonl", [{"prompt": text} for text in ("one", "two", "three")]),
        tmp_path / "o.jsonl",
    )
    assert run("decontaminate", file, "--against", f"t={first}", "--against", f"t={second}", "--out", out) == 0
    assert [row["prompt"] for row in read(out)] == ["three"]
    assert run("decontaminate", file, "--against", first, "--out", out) == 2
    assert f"--against {first!r}: expected NAME=FILE, such as one={first}" in capsys.readouterr().err
    assert run("decontaminate", file, "--against", tmp_path / "onne.jsonl", "--out", out) == 2
    assert f"expected NAME=FILE, such as one={first}" in capsys.readouterr().err


def test_splits_by_text_and_by_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"prompt": f"q{n}", "day": f"2024-{n % 12 + 1:02}-15"} for n in range(48)]
    file, train, test = write(tmp_path / "in.jsonl", rows), tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    outs = ["--train", train, "--test", test]
    assert run("split", file, "--every", 4, *outs) == 0
    assert [row["prompt"] for row in read(test)] == [r["prompt"] for r in rows if is_heldout(r["prompt"], 4)]
    assert len(read(train)) + len(read(test)) == 48
    assert run("split", file, "--field", "day", "--from", "2024-11-01", *outs) == 0
    assert {row["day"][5:7] for row in read(test)} == {"11", "12"}
    assert run("split", file, "--field", "prompt", "--from", "2024-11-01", *outs) == 2
    assert "line 1, field 'prompt': expected a date like 2025-01-31, got 'q0'" in capsys.readouterr().err
    assert run("split", file, *outs) == 2 and run("split", file, "--field", "day", "--from", "2030-01-01", *outs) == 2
    assert len(read(test)) == 8  # as it was


@pytest.mark.slow
def test_published_problems_against_their_own_test(shared_data: Path, tmp_path: Path):
    """GSM8K's own parts: three near duplicates of test questions stand in its training part."""
    train, test = (f"{shared_data}/gsm8k/{part}.jsonl.gz" for part in ("train", "test"))
    out = tmp_path / "out.jsonl"
    assert run("decontaminate", train, "--field", "question", "--against", f"gsm8k={test}", "--out", out) == 0
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["read"] == 7473 and 0 < report["removed"]["contaminated"] < 60
