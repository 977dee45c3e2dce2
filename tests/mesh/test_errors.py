"""Messages that point from a wrong name to the right one."""

from pathlib import Path

import pytest

from mesh import errors
from mesh.errors import UserError, did_you_mean, install_hint, once, taken_from


def test_the_nearest_names_are_proposed() -> None:
    assert did_you_mean("dmeo", ["demo", "bench", "sft"]) == "; did you mean 'demo'?"


def test_case_does_not_matter() -> None:
    assert did_you_mean("QWEN3", ["qwen3", "llama"]) == "; did you mean 'qwen3'?"


def test_without_a_near_name_all_are_listed() -> None:
    assert did_you_mean("xyz", ["b", "a", "a"]) == "; known: a, b"


def test_a_long_list_is_cut_and_counted() -> None:
    assert did_you_mean("?", [f"n{i:02}" for i in range(30)], limit=2) == ("; known: n00, n01, ... (30 in all)")


def test_without_options_there_is_no_hint() -> None:
    assert did_you_mean("x", []) == ""


def test_an_optional_part_is_installed_as_the_project_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert install_hint("mcp") == 'in the checkout, pip install -c constraints.txt -e ".[mcp]"'
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "mesh" / "errors.py"))  # as in a wheel: no checkout around
    assert install_hint("mcp") == 'pip install "axlearn-like[mcp]"'


def test_a_name_that_comes_twice_is_refused() -> None:
    assert once("--price", [("v5e", 1), ("v5p", 2)]) == {"v5e": 1, "v5p": 2}
    with pytest.raises(UserError, match="--price v5e: expected once, got 1 and 3"):
        once("--price", [("v5e", 1), ("v5p", 2), ("v5e", 3)])


def test_a_relative_path_is_said_to_be_of_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert taken_from("a/b") == f"; a relative path is taken from the working directory, {tmp_path}"
    assert taken_from(tmp_path) == ""
