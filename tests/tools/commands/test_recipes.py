"""`axl recipes`."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from experiments.recipes.fit import Fit
from experiments.recipes.recipes import Recipe
from mesh.errors import UserError
from tests.tpu_compiler import needs_tpu_compiler
from tools.commands.recipes import QUICK, command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


def answer(*arguments: str) -> list[dict[str, Any]]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output.splitlines()[-1])["recipes"]


def test_recipes_are_listed_by_model_job_and_machine():
    listed = invoke("--model", "qwen3-8b", "--machine", "v5e:2x4").output.splitlines()
    assert [line.split() for line in listed] == [
        ["qwen3_8b_sft", "Qwen3-8B", "sft", "v5e:2x4"],
        ["qwen3_8b_rl", "Qwen3-8B", "rl", "v5e:2x4"],
    ]
    assert invoke("--model", "qwen3_8b", "--machine", "v5e:2x4").output.splitlines() == listed
    with pytest.raises(UserError, match="no recipe is for that"):
        invoke("--model", "qwen3-8b", "--machine", "v5e:1x1")
    with pytest.raises(UserError, match="no recipe 'qwen3_8_rl'; did you mean 'qwen3_8b_rl'"):
        invoke("qwen3_8_rl")


def test_a_card_has_command_memory_by_kind_and_seconds_that_are_said_to_be_predicted():
    said = invoke("qwen3_8b_rl", "--machine", "v5e:2x4").output
    assert 'axl rl qwen3_8b_rl --fleet "trainer=v5e:2x4,workers=trainer" --runtime inprocess' in said
    assert "trainer: parameters 4.1 + moments" in said and "the next version's weights 2.0" in said
    assert "s a step (predicted by arithmetic" in said
    (row,) = answer("llama31_8b_sft", "--machine", "h100:8")
    assert row["command"] == "axl train llama31_8b_sft" and row["method"] == "full" and row["fits"]
    assert sum(row["holds"].values()) < row["machine"]["memory"]


def test_a_machine_that_is_too_small_is_refused_with_what_would_fit():
    with pytest.raises(UserError, match=r"What would: v6e:2x2 \([\d.]+ GB of 33.0 GB"):
        invoke("llama33_70b_sft", "--machine", "v6e:1x1")


def test_a_check_goes_on_after_a_recipe_that_is_refused(monkeypatch: pytest.MonkeyPatch):
    where = ("--machine", "h100:8", "--model", "qwen3_8b", "--check", "full")
    fit = Recipe.fit

    def refused(recipe: Recipe, machine: str) -> Fit:
        if recipe.job == "sft":
            raise UserError("28 GB more than there is")
        return fit(recipe, machine)

    monkeypatch.setattr(Recipe, "fit", refused)
    result = invoke(*where)
    assert "qwen3_8b_sft on h100:8 does not fit: 28 GB more than there is" in result.output
    assert "qwen3_8b_rl on h100:8: axl rl" in result.output
    assert result.output.endswith("0 compiled, 0 fit; 1 fit by arithmetic alone; not qwen3_8b_sft on h100:8\n")
    assert result.exit_code == 1


def test_a_check_that_is_interrupted_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch):
    fit = Recipe.fit

    def interrupted(recipe: Recipe, machine: str) -> Fit:
        if recipe.job == "rl":
            raise KeyboardInterrupt
        return fit(recipe, machine)

    monkeypatch.setattr(Recipe, "fit", interrupted)
    result = invoke("--machine", "h100:8", "--model", "qwen3_8b", "--check", "full", "--json")
    assert "stopped after 1 of 2; the same command goes on" in result.stderr and result.exit_code == 130
    rows = json.loads(result.stdout.splitlines()[-1])["recipes"]
    assert [row["name"] for row in rows] == ["qwen3_8b_sft"]


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.timeout(1800)
def test_the_quick_check_compiles_three_recipes_that_fit():
    rows = answer("--check", "quick")
    assert [(row["name"], row["machine"]["text"]) for row in rows] == list(QUICK)
    for row in rows:
        assert all(one["fits"] for one in row["compiled"].values())
        assert row["compiled"]["train"]["needed"] <= 1.05 * sum(row["holds"].values())
