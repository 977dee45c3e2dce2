"""Experiments are found by name, in the package and out of it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from axlearn_like.config import ConfigError, path_of, set_path
from experiments import registry
from mesh.errors import UserError
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


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = tmp_path / "outside_of_the_tree.py"
    path.write_text(OUTSIDE)
    yield str(path)
    sys.modules.pop("outside_of_the_tree", None)


def test_every_experiment_of_the_package_is_a_config_under_its_name():
    for name in registry.entries():
        assert path_of(registry.get(name)) == name


def test_names_are_read_without_importing_a_module_of_the_package(checkout: Path):
    code = (
        "import sys; from experiments import registry; registry.check_name('demo'); names = list(registry.entries());"
        "print(names == sorted(names), [m for m in sys.modules if m.startswith('experiments.') or m == 'jax'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=checkout)
    own = ["experiments.recipes", "experiments.recipes.recipes", "experiments.registry"]
    assert done.stdout.strip() == f"True {own}"


def test_an_entry_says_module_and_summary():
    entry = registry.entries()["demo"]
    assert entry.module == registry.find("demo").__module__
    assert entry.summary == str(registry.find("demo").__doc__).partition("\n")[0]


def test_errors_call_the_root_by_the_experiments_name(outside: str):
    cfg = registry.get(f"{outside}:my_run")
    with pytest.raises(ConfigError, match=r"my_run\.blocks\.0\.norm has no field 'epss'; did") as caught:
        set_path(cfg, "blocks.0.norm.epss", "1")
    assert caught.value.path == "my_run.blocks.0.norm.epss"
    with pytest.raises(ConfigError, match=r"my_run\.dim is REQUIRED") as caught:
        cfg.set(dim=Model.Config().dim).build()
    assert caught.value.path == "my_run.dim"


def test_an_unknown_name_offers_the_nearest():
    with pytest.raises(UserError, match="no experiment 'demo_stf'; did you mean 'demo_sft"):
        registry.get("demo_stf")


def test_an_unknown_argument_offers_the_nearest():
    with pytest.raises(UserError, match="'demo' takes no argument 'sed'; use --set path=value; did you mean 'seed'"):
        registry.get("demo", sed=3)


def test_a_function_that_needs_arguments_is_refused():
    with pytest.raises(UserError, match="tiny_trainer': its function needs num_steps; expected a default"):
        registry.get("tests.axlearn_like.tiny:tiny_trainer")


def test_two_experiments_of_one_name_are_refused(tmp_path: Path):
    source = "@experiment\ndef run():\n    'Twice.'\n"
    (tmp_path / "one.py").write_text(source)
    assert registry.read_entries(tmp_path, "lab") == {"run": ("lab.one", "Twice.")}
    (tmp_path / "other.py").write_text(source)
    with pytest.raises(UserError, match="two experiments are called 'run', in lab.one and lab.other"):
        registry.read_entries(tmp_path, "lab")


def needs(*, dim: int) -> Model.Config:
    return Model.Config(dim=dim)


def test_what_cannot_be_found_or_called_is_refused():
    def local() -> Model.Config:
        return Model.Config()

    with pytest.raises(UserError, match="only a top-level function"):
        registry.experiment(local)
    with pytest.raises(UserError, match="experiment needs: the parameter dim"):
        registry.experiment(needs)


def test_a_file_out_of_the_tree(outside: str):
    assert registry.get(f"{outside}:my_run") == Model.Config(dim=3)
    assert path_of(registry.get("outside_of_the_tree:my_run")) == "my_run"
    with pytest.raises(UserError, match="has no function 'my_rum'; did you mean 'my_run'"):
        registry.get(f"{outside}:my_rum")
    with pytest.raises(UserError, match="returned 3, not a config"):
        registry.get(f"{outside}:not_a_config")
    with pytest.raises(UserError, match="no file"):
        registry.get(f"{outside}x.py:my_run")


def test_a_file_that_would_hide_a_module_is_refused(tmp_path: Path):
    path = tmp_path / "json.py"
    path.write_text(OUTSIDE)
    with pytest.raises(UserError, match=r"already a module 'json' \(.*json/__init__\.py\); rename the file"):
        registry.get(f"{path}:my_run")


def test_a_module_by_name():
    with pytest.raises(UserError, match="no module 'no_such_package'"):
        registry.get("no_such_package.module:run")
