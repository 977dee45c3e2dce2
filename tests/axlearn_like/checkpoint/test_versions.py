"""Names of saved weights: each means one checkpoint, and one that is not there is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.versions import (
    CheckpointError,
    NoCheckpoint,
    SavedWeights,
    find_version,
    label,
    split_version,
)
from axlearn_like.config import label as label_config
from axlearn_like.config.errors import marked_path


def make_step(folder: Path, step: int) -> Path:
    path = folder / str(step)
    for item in ("params", "manifest"):
        (path / item).mkdir(parents=True)
    return path


def make_best(folder: Path, *steps: int) -> None:
    for step in steps:
        make_step(folder / "best", step)
    (folder / "best" / "best.json").write_text(json.dumps({"metric": "x", "steps": {str(s): 0.1 for s in steps}}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of RL: steps 8 and 10, the best ones 6 and 2 in this order, and a supervised phase of 90 steps."""
    run = tmp_path_factory.mktemp("runs") / "mine"
    rl = run / "checkpoints" / "rl"
    for step in (8, 10):
        make_step(rl, step)
    make_best(rl, 6, 2)
    make_step(run / "warm_start" / "checkpoints", 90)
    (run / "config.txt").touch()
    return run


@pytest.mark.parametrize(
    "name, place, version",
    [
        ("", "checkpoints/rl/10", 10),
        ("@best", "checkpoints/rl/best/6", 6),
        ("@10", "checkpoints/rl/10", 10),
        ("@8", "checkpoints/rl/8", 8),
        ("@6", "checkpoints/rl/best/6", 6),
        ("@2", "checkpoints/rl/best/2", 2),
        ("/checkpoints", "checkpoints/rl/10", 10),
        ("/checkpoints@best", "checkpoints/rl/best/6", 6),
        ("/checkpoints/rl", "checkpoints/rl/10", 10),
        ("/checkpoints/rl@8", "checkpoints/rl/8", 8),
        ("/checkpoints/rl/8", "checkpoints/rl/8", 8),
        ("/checkpoints/rl/best", "checkpoints/rl/best/6", 6),
        ("/checkpoints/rl/best/2", "checkpoints/rl/best/2", 2),
        ("/warm_start@90", "warm_start/checkpoints/90", 90),
        ("/warm_start", "warm_start/checkpoints/90", 90),
        ("/warm_start/checkpoints/90", "warm_start/checkpoints/90", 90),
    ],
)
def test_each_name_means_one_checkpoint(run: Path, name: str, place: str, version: int):
    assert find_version(f"{run}{name}") == SavedWeights(run / place, version)


@pytest.mark.parametrize(
    "name",
    [
        "@7",
        "@0",
        "@90",  # of the supervised phase, which is not update 90
        "/checkpoints/rl/7",
        "/checkpoints/rl/best/8",
        "/warm_start@best",
        "/checkpoints/best",
        "@",
        "x",
    ],
)
def test_what_is_not_there_is_refused_and_never_replaced(run: Path, name: str):
    with pytest.raises(NoCheckpoint, match="no checkpoint"):
        find_version(f"{run}{name}")


def test_the_refusal_lists_what_there_is(run: Path):
    with pytest.raises(
        NoCheckpoint,
        match=r"mine@7 is no checkpoint: \S+rl has steps 8, 10; \S+best has steps 2, 6; the nearest step is 8",
    ):
        find_version(f"{run}@7")


def test_a_supervised_run_and_one_before_rl(tmp_path: Path):
    for step in (3, 12):
        make_step(tmp_path / "sft" / "checkpoints", step)
    make_best(tmp_path / "sft" / "checkpoints", 3)
    assert find_version(tmp_path / "sft").version == 12
    assert find_version(f"{tmp_path}/sft@best").path == tmp_path / "sft/checkpoints/best/3"
    make_step(tmp_path / "young" / "warm_start" / "checkpoints", 5)
    found = find_version(tmp_path / "young")
    assert (found.path.name, found.version) == ("5", 0), "RL begins with it as version 0"


def test_the_best_of_the_supervised_phase_is_not_that_of_the_run(tmp_path: Path):
    make_step(tmp_path / "checkpoints" / "rl", 10)
    make_best(tmp_path / "warm_start" / "checkpoints", 5)
    with pytest.raises(NoCheckpoint, match=r"@best is no checkpoint: \S+rl has step 10"):
        find_version(f"{tmp_path}@best")
    assert find_version(f"{tmp_path}/warm_start@best").version == 5


def test_a_run_that_is_not_there_names_the_nearest(tmp_path: Path):
    make_step(tmp_path / "demo_sft" / "checkpoints", 4)
    with pytest.raises(NoCheckpoint, match=r"demo_stf holds no checkpoint; .*; did you mean 'demo_sft'\?"):
        find_version(tmp_path / "demo_stf")


def test_a_start_from_no_run_has_the_path_of_its_config(tmp_path: Path):
    start = label_config(StartFrom.Config(path=str(tmp_path)), "mine.start_from").build()
    for read in (start.check, start.params):
        with pytest.raises(NoCheckpoint) as refused:
            read({})
        assert marked_path(refused.value) == "mine.start_from"


def test_the_best_is_not_guessed_among_several(tmp_path: Path):
    make_best(tmp_path / "checkpoints", 2, 6)
    best = tmp_path / "checkpoints" / "best"
    for text in ("{", '{"steps": {"4": 1.0}}'):
        (best / "best.json").write_text(text)
        with pytest.raises(NoCheckpoint, match=r"best.json does not say which of steps 2, 6 is best; name one"):
            find_version(best)


@pytest.mark.parametrize(
    ("name", "expected"), [("", "mine"), ("@best", "mine@6"), ("/checkpoints/rl/8", "mine@8"), ("@10", "mine@10")]
)
def test_what_is_asked_is_named_with_its_version(run: Path, name: str, expected: str):
    assert label(f"{run}{name}", run, find_version(f"{run}{name}")) == expected


def test_a_folder_whose_name_has_the_sign_is_itself(tmp_path: Path):
    make_step(tmp_path / "lr@6" / "checkpoints", 4)
    assert find_version(tmp_path / "lr@6").version == find_version(f"{tmp_path}/lr@6@4").version == 4
    assert split_version(f"{tmp_path}/lr@6") == (tmp_path / "lr@6", None)


@given(st.text(alphabet="abc@/.0123456789best", max_size=20))
def test_any_text_is_a_checkpoint_or_refused(text: str):
    try:
        found = find_version(f"/nowhere/{text}")
    except CheckpointError as error:
        assert "holds no checkpoint" in str(error)
    else:
        raise AssertionError(found)
