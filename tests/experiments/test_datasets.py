"""Published datasets by name: a folder of experiments/ adds one, and the library knows none of them."""

import re
from pathlib import Path

import pytest

from experiments.datasets import dataset, find_dataset, humaneval, known_datasets
from experiments.gsm8k.data import gsm8k
from experiments.registry import entries
from experiments.text_to_sql.ehrsql import ehrsql
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.datasets import rows
from rl.tasks.rows.task_rows import TaskRows
from tests.test_floors import ROOT
from tests.tools.test_cli import run_and_list_modules

APPLICATIONS = ("demo", "gsm8k", "text_to_sql")
LIBRARY = ("mesh", "axlearn_like", "models", "rl")


def test_datasets_are_found_by_the_names_that_users_type():
    assert set(known_datasets()) == {"ehrsql", "gsm8k", "humaneval"}
    assert known_datasets()["gsm8k"].module == "experiments.gsm8k.data"
    found = find_dataset("gsm8k")
    assert found is not None and found.rows is gsm8k and found.verifier is None
    assert find_dataset("gsm") is None
    assert {"demo", "gsm8k_small", "text_to_sql", "text_to_sql_sft"} <= set(entries())


def test_one_of_ones_own_is_known_once_it_is_marked():
    def mine(files: str) -> TaskRows.Config:
        return rows(files)

    assert find_dataset("mine") is None
    assert dataset()(mine) is mine
    found = find_dataset("mine")
    assert found is not None and found.rows is mine


def test_a_list_of_datasets_imports_no_application(checkout: Path):
    code = "from experiments.datasets import known_datasets\nknown_datasets()\nstatus = 0"
    _, modules = run_and_list_modules(code, checkout)
    assert not [name for name in modules if name.startswith("experiments.text_to_sql")]


@pytest.mark.parametrize("name", APPLICATIONS)
def test_an_application_is_a_folder_with_readme_config_and_data(name: str):
    folder = ROOT / "experiments" / name
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / "config.py").is_file()
    named = re.findall(r"`(\w+\.py)`", text)
    assert set(named) == {path.name for path in folder.glob("*.py")} - {"__init__.py"}


def test_the_library_knows_no_application():
    """SQLite is the library's own store of results."""
    words = re.compile(r"gsm8k|ehrsql|text.to.sql|\bsql\b|sql_|sqlverifier|sqltool", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for room in LIBRARY
        for path in sorted((ROOT / room).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert found == []


def test_published_datasets_are_a_line_each(shared_data: Path):
    maths = gsm8k(f"{shared_data}/gsm8k/train.jsonl.gz", f"{shared_data}/gsm8k/test.jsonl.gz")
    code = humaneval(f"{shared_data}/humaneval/HumanEval.jsonl.gz")
    folder = shared_data / "ehrsql-2024"
    parts = [tuple(str(folder / f"{part}.{what}.json.gz") for what in ("data", "label")) for part in ("valid", "test")]
    sql = ehrsql(*parts[0], heldout=(parts[1][0], parts[1][1]))
    tasks = TaskMixture.Config(families=(maths.set(weight=2.0), code, sql), seed=1).build()
    assert [tasks.train(i).family for i in range(4)].count("gsm8k") == 2
    problem = next(p for p in map(tasks.train, range(4)) if p.family == "gsm8k")
    final = problem.answer.rpartition("####")[2].strip()
    assert tasks.score(problem, f"so it is\n#### {final}") == 1.0 and tasks.score(problem, "#### 1234567") == 0.0
    assert tasks.score(problem, problem.answer) == 1.0
    votes = [tasks.vote(problem, text) for text in ("so #### 1,000", "#### 1000.", "#### x", "1000")]
    assert votes == ["1000", "1000", "", "1000"]
    assert tasks.score(problem, f"\\boxed{{{final}}}") == 1.0 and tasks.form(problem, "five") == "none"
    assert len(tasks.heldout(20)) == 60 and set(tasks.digests()) == {"gsm8k", "humaneval", "ehrsql"}
    assert {"query", "id"} <= next(p for p in map(tasks.train, range(4)) if p.family == "ehrsql").entry.keys()
