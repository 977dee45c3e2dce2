"""Experiments are found by name, in the package and out of it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from axlearn_like.config import set_path
from experiments import registry
from tests.axlearn_like.config.zoo import Model

OUTSIDE = '''
from experiments.registry import experiment
from tests.axlearn_like.config.zoo import Model

@experiment
def my_run(*, dim: int = 3) -> Model.Config:
    """A run."""
    return Model.Config(dim=dim)

def not_a_config():
    return 3
'''


def in_package(name: str, module: str = "experiments.made_up") -> Any:
    """A function that says it was defined at the top of a module of the package."""

    def template(*, dim: int = 2) -> Model.Config:
        return Model.Config(dim=dim)

    function = FunctionType(template.__code__, globals(), name)
    function.__kwdefaults__ = {"dim": 2}
    function.__qualname__, function.__module__ = name, module
    return function


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_functions", {})


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = tmp_path / "outside_of_the_tree.py"
    path.write_text(OUTSIDE)
    yield str(path)
    sys.modules.pop("outside_of_the_tree", None)


def test_every_experiment_of_the_package_is_a_config_under_its_name():
    for name in registry.names():
        assert registry.get(name)._path == name


def test_an_experiment_is_found_by_its_name(own_registry: None):
    function = in_package("small_run")
    assert registry.experiment(function) is function
    assert registry.find("small_run") is function
    assert registry.get("small_run") == Model.Config(dim=2)
    assert registry.get("small_run", dim=5) == Model.Config(dim=5)


def test_errors_call_the_root_by_the_experiments_name(own_registry: None):
    registry.experiment(in_package("small_run"))
    cfg = registry.get("small_run")
    with pytest.raises(AttributeError, match=r"small_run\.blocks\.0\.norm has no field 'epss'; did"):
        set_path(cfg, "blocks.0.norm.epss", "1")
    with pytest.raises(ValueError, match=r"small_run\.dim is REQUIRED"):
        cfg.set(dim=Model.Config().dim).build()


def test_an_unknown_name_offers_the_nearest():
    function = in_package("a_made_up_run")
    registry.experiment(function)
    try:
        with pytest.raises(LookupError, match="no experiment 'a_made_up_rum'; did you mean 'a_made_up_run"):
            registry.get("a_made_up_rum")
    finally:
        del registry._functions["a_made_up_run"]


def test_two_experiments_of_one_name_are_refused_but_a_reload_is_not(own_registry: None):
    registry.experiment(in_package("run"))
    again = registry.experiment(in_package("run"))
    assert registry.find("run") is again
    with pytest.raises(ValueError, match="two experiments are called 'run', in experiments.made_up and"):
        registry.experiment(in_package("run", "experiments.other"))


def test_what_cannot_be_found_or_called_is_refused():
    def local() -> Model.Config:
        return Model.Config()

    with pytest.raises(TypeError, match="only a top-level function"):
        registry.experiment(local)
    needs = in_package("needs")
    needs.__kwdefaults__ = None
    with pytest.raises(TypeError, match="experiment needs: the parameter dim"):
        registry.experiment(needs)


def test_a_file_out_of_the_tree(outside: str):
    assert registry.get(f"{outside}:my_run") == Model.Config(dim=3)
    assert registry.get("outside_of_the_tree:my_run")._path == "my_run"
    with pytest.raises(LookupError, match="has no function 'my_rum'; did you mean 'my_run'"):
        registry.get(f"{outside}:my_rum")
    with pytest.raises(TypeError, match="returned 3, not a config"):
        registry.get(f"{outside}:not_a_config")
    with pytest.raises(LookupError, match="no file"):
        registry.get(f"{outside}x.py:my_run")


def test_an_outside_experiment_may_have_the_name_of_one_inside(own_registry: None, outside: str):
    inside = registry.experiment(in_package("my_run"))
    assert registry.get(f"{outside}:my_run") == Model.Config(dim=3)
    assert registry.find("my_run") is inside


def test_a_file_that_would_hide_a_module_is_refused(tmp_path: Path):
    path = tmp_path / "json.py"
    path.write_text(OUTSIDE)
    with pytest.raises(LookupError, match="already a module 'json'; rename the file"):
        registry.get(f"{path}:my_run")


def test_a_module_by_name():
    with pytest.raises(LookupError, match="no module 'no_such_package'"):
        registry.get("no_such_package.module:run")
