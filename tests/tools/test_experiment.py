"""Experiments named on the command line: what is refused, how early, and what is not disguised."""

from pathlib import Path

import jax
import numpy as np
import pytest

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.config import ConfigError, get_path
from axlearn_like.layers.base import Params
from experiments import registry
from mesh.errors import UserError
from tests.rl.serving.test_policy import policy_params, save
from tests.rl.tiny import tiny_experiment, tiny_run
from tests.tools.test_cli import run_and_list_modules
from tools import cli
from tools.experiment import default_run_dir, find_policy, load_experiment

SOURCE = """
from axlearn_like.config import ConfigBase, Configurable


class Thing(Configurable):
    class Config(ConfigBase["Thing"]):
        size: int = 3
        seed: int = 0

    def __init__(self, cfg: Config) -> None:
        pass


def thing(*, seed: int = 7) -> Thing.Config:
    return Thing.Config(seed=seed)


def unseeded() -> Thing.Config:
    seed = 1
    return Thing.Config(size=seed)


def mistaken() -> Thing.Config:
    return Thing.Config(sise=4)


def enlarge(cfg) -> None:
    cfg.size *= 10


def buggy() -> Thing.Config:
    return {}["missing"]
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An experiment module of a user, outside the packages."""
    path = tmp_path_factory.mktemp("own") / "own_experiment_module.py"
    path.write_text(SOURCE)
    return str(path)


def test_an_unknown_experiment_is_refused_with_the_nearest() -> None:
    name = next(iter(registry.entries()))
    with pytest.raises(UserError, match=f"no experiment '{name}x'; did you mean '{name}'"):
        load_experiment(name + "x")


def test_an_unknown_experiment_is_refused_before_jax_is_imported(checkout: Path) -> None:
    for arguments in (["train", "nope"], ["rl", "nope"], ["config", "show", "nope"]):
        code = f"from tools.cli import main\nstatus = main({arguments!r})"
        status, modules = run_and_list_modules(code, checkout)
        assert status == 2
        assert not modules & {"jax", "flax", "ray", "numpy"}


def test_edits_and_seed_are_applied(own: str) -> None:
    cfg = load_experiment(f"{own}:thing", ["size=5"], seed=11)
    assert (get_path(cfg, "size"), get_path(cfg, "seed")) == (5, 11)
    assert get_path(load_experiment(f"{own}:thing"), "seed") == 7


def test_a_seed_for_an_experiment_without_one_is_refused(own: str) -> None:
    with pytest.raises(UserError, match="takes no argument 'seed'"):
        load_experiment(f"{own}:unseeded", seed=1)


@pytest.mark.parametrize(
    ("edit", "words"), [("sise=4", "size"), ("size=x", "expected int, got 'x'"), ("size", "path=")]
)
def test_a_wrong_edit_is_a_user_error(own: str, edit: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_experiment(f"{own}:thing", [edit])


def test_errors_of_edits_name_the_place_from_the_experiment(own: str) -> None:
    with pytest.raises(ConfigError, match=r"^thing has no field 'sizes'; did you mean 'size'") as caught:
        load_experiment(f"{own}:thing", ["sizes=3"])
    assert caught.value.path == "thing.sizes"


def test_a_field_misspelt_in_the_experiment_is_a_user_error(own: str) -> None:
    with pytest.raises(UserError, match="sise.*size"):
        load_experiment(f"{own}:mistaken")


def test_a_bug_of_the_experiment_keeps_its_traceback(own: str) -> None:
    with pytest.raises(KeyError, match="missing"):
        load_experiment(f"{own}:buggy")


def test_the_command_line_shows_an_own_experiment(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", f"{own}:thing", "--set", "size=8"]) == 0
    assert "size: 8" in capsys.readouterr().out.splitlines()


def test_train_and_rl_name_what_they_expect(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "rl"):
        assert cli.main([name, f"{own}:thing"]) == 2
        assert "own_experiment_module:Thing" in capsys.readouterr().err


def test_runs_are_named_after_their_experiment() -> None:
    assert default_run_dir("demo", None) == Path("runs/demo")
    assert default_run_dir("lab/own.py:mine", None) == Path("runs/mine")
    assert default_run_dir("demo", Path("/x")) == Path("/x")


def test_modifiers_are_applied_before_the_edits(own: str) -> None:
    assert get_path(load_experiment(f"{own}:thing", applied=[f"{own}:enlarge"] * 2), "size") == 300
    assert get_path(load_experiment(f"{own}:thing", ["size=4"], applied=[f"{own}:enlarge"]), "size") == 4
    cfg = load_experiment("demo_sft", ["model.block.attention.rank=2"], applied=["low_rank"])
    assert get_path(cfg, "model.block.attention.rank") == 2


@pytest.mark.parametrize(
    ("modifier", "message"),
    [
        ("low_rnk", "did you mean 'low_rank'"),
        ("ConfigBase", "no modifier"),
        ("int8", "--apply int8: .* has no Block.Config .All matrices"),
    ],
)
def test_a_modifier_that_does_not_exist_or_fit_is_refused(own: str, modifier: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_experiment(f"{own}:thing", applied=[modifier])


def described(params: Params) -> Params:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params)


def test_a_version_of_a_run_is_named_in_one_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that ask a policy, adapters' and starts' paths mean the same weights; none takes others instead."""
    run = tmp_path / "runs" / "tiny_experiment"
    with tiny_run(run, tiny_experiment()):
        for folder, step in ((run / "checkpoints" / "rl", 4), (run / "checkpoints" / "rl" / "best", 2)):
            save(folder, step, policy_params(step))
    (folder / "best.json").write_text('{"metric": "evaluation/pass@1", "steps": {"2": 0.5}}')
    monkeypatch.chdir(tmp_path)
    experiment = "tests.rl.tiny:tiny_experiment"
    for name, step, label in (
        (str(run), 4, "tiny_experiment"),
        (experiment, 4, "tiny_experiment"),
        (f"{experiment}@best", 2, "tiny_experiment@2"),
        ("runs/tiny_experiment@best", 2, "tiny_experiment@2"),
        (str(folder), 2, "tiny_experiment@2"),
        (str(folder / "2"), 2, "tiny_experiment@2"),
        ("runs/tiny_experiment@4", 4, "tiny_experiment@4"),
    ):
        _, weights, found = find_policy(name, [], random_weights=False, command="eval")
        assert weights is not None and (weights.version, found) == (step, label), name
        wanted = described(policy_params(step))
        if ":" not in name:
            params = StartFrom.Config(path=name).build().params(wanted)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), policy_params(step))
    for name in ("runs/tiny_experiment@3", f"{experiment}@3", "runs/tiny_experiment/checkpoints/rl/3"):
        with pytest.raises(UserError, match=r"3 is no checkpoint: \S+rl has step 4; \S+best has step 2; the nearest"):
            find_policy(name, [], random_weights=False, command="serve")
    with pytest.raises(UserError, match="3 is no checkpoint"):
        StartFrom.Config(path=f"{run}@3").build().check(wanted)
