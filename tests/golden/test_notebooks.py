"""The notebooks for Jupyter and Colab have the cells of their percent files, which tests run, and what these showed."""

import json
from typing import Any

import pytest

from tests.golden.notebooks import FOLDER, NAMES, badge, cells, notebook


def stored(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_is_that_of_the_percent_file(name: str):
    kept = [cell for cell in stored(name)["cells"] if cell["id"] != "colab"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in kept]
    assert found == list(cells((FOLDER / f"{name}.py").read_text())), f"python -m tests.golden.notebooks {name}"
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_shows_what_its_cells_have_shown_and_no_error(name: str):
    whole = stored(name)
    outputs = [output for cell in whole["cells"] for output in cell.get("outputs", ())]
    assert outputs and {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    assert len({cell["id"] for cell in whole["cells"]}) == len(whole["cells"])
    assert len(json.dumps(whole)) < 300_000
    assert notebook(whole["cells"]) == (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")


def test_the_first_notebook_shows_that_the_policy_has_learned():
    text = json.dumps(stored("first_run"))
    assert "log-probabilities within" in text and "data:image/png;base64" in text and "kind: JobSet" in text


def test_cells_and_badge():
    text = "# %% [markdown]\n# # Title\n#\n# More.\n\n# %%\nx = 1  # pyright: ignore[a]\nx\n"
    assert list(cells(text)) == [("markdown", "# Title\n\nMore."), ("code", "x = 1\nx")]
    assert "colab.research.google.com/github/me/mine/blob/main/examples/notebooks/a.ipynb" in badge("a", "me/mine")
