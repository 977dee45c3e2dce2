"""Policies that join, stop and resume in a run that goes on: bits of each alone, refusals, and a file of anyone's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from mesh import UserError
from rl.experiment import RLExperiment
from rl.runtime.policies.changes import (
    WantedChanges,
    changes_path,
    failures,
    policy_run,
    read_changes,
    stopped_policies,
    with_joined,
)
from rl.runtime.policies.requests import add_policy, resume_policy, stop_policy
from rl.runtime.run import RLRun
from tests.rl.runtime.policies.tiny_policies import tiny_policies, tiny_wholes
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, metrics

JOINING = {"seed": "11", "num_steps": "3", "learner.schedule.lr": "3e-2"}
CHANGES = ("policy_admitted", "policy_failed", "policy_stopped")  # events
Look = Callable[[RunDirectory], bool | None]


def fleet(*names: str, **changes: Any) -> RLExperiment.Config:
    """Return the tiny experiment with LoRA and a policy for each of these names, told apart by their seeds."""
    policies = {name: {"seed": number} for number, name in enumerate(names)}
    return tiny_policies(policies, staleness=1, **changes)


def run(path: Path, cfg: RLExperiment.Config, look: Look = lambda run: False) -> dict[str, Any] | None:
    """Run in this process; `look` is asked again and again, and True stops the run."""
    whole = RunDirectory.attach(path)
    stop = lambda: bool(look(whole))  # noqa: E731
    return RLRun(cfg.build(), say=lambda line: None).run(path, runtime="inprocess", progress=False, stop=stop)


def updates(whole: RunDirectory, name: str) -> int:
    own = policy_run(whole, name)
    return len(metrics(own.path)) if own.metrics_path.exists() else 0


def asked_at(name: str, step: int, *asks: Callable[[RunDirectory], object]) -> Look:
    """Return a look that asks, once, as soon as a policy has made so many updates."""
    left = list(asks)

    def look(whole: RunDirectory) -> None:
        while left and updates(whole, name) >= step:
            left.pop(0)(whole)

    return look


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs of one policy each, made when they are asked for."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            cfg = fleet("a", "b")
            cfg.policies = {name: {"a": {"seed": 0}, "b": {"seed": 1}}.get(name, JOINING)}
            run(path, cfg)
            made[name] = path / "policies" / name
        return made[name]

    return of


@pytest.mark.slow
def test_a_policy_that_joins_a_running_fleet_has_the_bits_that_it_has_alone_and_so_have_the_others(
    alone: Callable[[str], Path], tmp_path: Path
) -> None:
    said = list[str]()
    ask = asked_at("a", 2, lambda whole: said.append(add_policy(whole, "joined", JOINING)))
    report = run(tmp_path, fleet("a", "b", policy_slots=3), ask)
    assert said == ["joined joins at the next update"]
    assert report is not None and sorted(report["policies"]) == ["a", "b", "joined"] and not report["failed"]
    assert updates(RunDirectory.attach(tmp_path), "joined") == 3
    for name in ("a", "b", "joined"):
        assert_same_outcome(tmp_path / "policies" / name, alone(name))
    admitted = [(row["policy"], row["change"]) for row in events(tmp_path, "policy_admitted")]
    assert admitted == [("joined", 1)]


@pytest.mark.full
def test_a_policy_that_is_stopped_and_resumed_while_others_train_keeps_its_bits(
    alone: Callable[[str], Path], tmp_path: Path
) -> None:
    first = asked_at("a", 1, lambda whole: stop_policy(whole, "a"))
    then = asked_at("b", 3, lambda whole: resume_policy(whole, "a"))
    counts = list[int]()

    def look(whole: RunDirectory) -> None:
        first(whole)
        if updates(whole, "b") == 3:
            counts.append(updates(whole, "a"))
        then(whole)

    assert run(tmp_path, fleet("a", "b"), look) is not None
    assert counts and counts[0] < 3, "it made no updates while it was stopped"
    told = [(row["event"], row["change"]) for event in CHANGES for row in events(tmp_path, event)]
    assert told == [("policy_admitted", 2), ("policy_stopped", 1)]
    for name in ("a", "b"):
        assert_same_outcome(tmp_path / "policies" / name, alone(name))


@pytest.mark.full
def test_a_run_that_is_resumed_goes_on_with_those_that_joined_and_without_those_that_were_stopped(
    alone: Callable[[str], Path], tmp_path: Path
) -> None:
    whole, cfg = RunDirectory.attach(tmp_path), fleet("a", "b", policy_slots=3)
    ask = asked_at("a", 1, lambda whole: add_policy(whole, "joined", JOINING), lambda whole: stop_policy(whole, "b"))
    assert run(tmp_path, cfg, lambda whole: ask(whole) or updates(whole, "joined") >= 1) is None
    left = updates(whole, "b")
    report = run(tmp_path, cfg)
    assert report is not None and sorted(report["policies"]) == ["a", "joined"] and report["stopped"] == ["b"]
    assert updates(whole, "b") == left < 4
    assert "which does not run now" in resume_policy(whole, "b")
    report = run(tmp_path, cfg)
    assert report is not None and sorted(report["policies"]) == ["a", "b", "joined"] and report["stopped"] == []
    for name in ("a", "b", "joined"):
        assert_same_outcome(tmp_path / "policies" / name, alone(name))


@pytest.mark.full
def test_a_policy_that_cannot_be_saved_fails_alone_and_is_resumed_while_the_others_train(tmp_path: Path) -> None:
    whole, said = RunDirectory.attach(tmp_path), list[str]()
    add = asked_at("a", 1, lambda whole: add_policy(whole, "joined", JOINING))
    checkpoints = policy_run(whole, "joined").checkpoints / "rl"

    def look(whole: RunDirectory) -> None:
        add(whole)
        if said:
            return
        if checkpoints.parent.is_dir() and not checkpoints.exists():
            checkpoints.write_text("a file in the place of a folder")
        if "joined" in failures(whole):
            checkpoints.unlink()
            said.append(resume_policy(whole, "joined"))

    report = run(tmp_path, fleet("a", num_steps=12, policy_slots=2), look)
    assert said == ["joined goes on from its last checkpoint at the next update"]
    assert report is not None and sorted(report["policies"]) == ["a", "joined"] and not report["failed"]
    assert updates(whole, "joined") == 3 and not failures(whole)
    told = [row["event"] for event in CHANGES for row in events(tmp_path, event)]
    assert told == ["policy_admitted", "policy_admitted", "policy_failed"]


@pytest.mark.full
@pytest.mark.parametrize("row", ["no JSON}\n", '{"event": "add", "policy": "c", "edits": {"lerner": "1"}}\n'])
def test_a_row_that_somebody_spoils_costs_a_run_nothing_and_is_named_at_the_next(tmp_path: Path, row: str) -> None:
    def spoil(whole: RunDirectory) -> None:
        with changes_path(whole).open("a") as file:
            file.write(row)

    said, cfg, whole = list[str](), fleet("a", "b", policy_slots=3), RunDirectory.attach(tmp_path)
    look = asked_at("a", 1, spoil)
    stop = lambda: bool(look(whole))  # noqa: E731
    report = RLRun(cfg.build(), say=said.append).run(tmp_path, runtime="inprocess", progress=False, stop=stop)
    assert report is not None and sorted(report["policies"]) == ["a", "b"]
    assert [line for line in said if line.startswith("no policy joins: ")]
    with pytest.raises(UserError, match=r"policies.jsonl, line 1 is not JSON|policies\['c'\] has no field 'lerner'"):
        run(tmp_path, cfg)


# ---- what cannot be


@pytest.fixture
def resting(tmp_path: Path) -> RunDirectory:
    """The directory of a run of two policies that this process holds, as if it trained."""
    opened = RunDirectory.open(tmp_path / "run", to_text(fleet("a", "b")))
    for name in ("a", "b"):
        RunDirectory.open(opened.path / "policies" / name, "x").close()
    return opened


@pytest.mark.slow
def test_a_policy_without_a_free_slot_is_refused_by_name_and_a_stopped_one_frees_its_slot(
    resting: RunDirectory,
) -> None:
    with pytest.raises(UserError, match=r"policy 'c': no slot is free: 2 policies train, .*axl rl stop .* a\).*=3"):
        add_policy(resting, "c", {})
    stop_policy(resting, "a")
    assert add_policy(resting, "c", {"seed": "5"}) == "c joins at the next update"
    with pytest.raises(UserError, match="policy 'a': no slot is free"):
        resume_policy(resting, "a")
    stop_policy(resting, "c")
    assert resume_policy(resting, "a") == "a goes on from its last checkpoint at the next update"
    assert read_changes(resting).joined == {"c": {"seed": "5"}} and stopped_policies(resting) == {"c"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "edits", "message"),
    [
        ("a", {}, "policy 'a' is one of the run's, and trains; expected another name"),
        ("../c", {}, "policy '../c': expected a name of a-z, 0-9"),
        ("c", {"policy.block.attention.rank": "64"}, r"policies\['c'\].policy: rank 64 of .*; expected 4 or less"),
        ("c", {"engine.max_num_seqs": "64"}, r"policies\['c'\].engine.max_num_seqs: all policies share 'engine'"),
        ("c", {"lerner.schedule.lr": "1"}, r"policies\['c'\] has no field 'lerner'.*learner"),
        ("c", {"learner.schedule.lr": "fast"}, r"policies\['c'\].*lr: expected float, got 'fast'"),
        ("c", {"verifier": "os:system"}, r"policies\['c'\].verifier.*os"),
    ],
)
def test_a_policy_that_cannot_join_is_refused_by_name_and_field(
    tmp_path: Path, name: str, edits: dict[str, str], message: str
) -> None:
    cfg = fleet("a", "b", policy_slots=4)
    with RunDirectory.open(tmp_path / "run", to_text(cfg)) as whole:
        with pytest.raises(UserError, match=message):
            add_policy(whole, name, edits)
        assert not changes_path(whole).exists()


@pytest.mark.slow
def test_the_second_day_of_a_run_with_several_policies(resting: RunDirectory) -> None:
    for ask in (stop_policy, resume_policy):
        with pytest.raises(UserError, match=r"has no policy 'aa'; did you mean 'a'\?; it has a, b"):
            ask(resting, "aa")
    with pytest.raises(UserError, match="policy 'a' trains; expected one that was stopped, or has failed"):
        resume_policy(resting, "a")
    stop_policy(resting, "a")
    with pytest.raises(UserError, match="policy 'a' was stopped; expected one that trains"):
        stop_policy(resting, "a")
    with pytest.raises(UserError, match=r"is one of the run's, and was stopped; expected axl rl resume .* a"):
        add_policy(resting, "a", {})
    add_policy(resting, "c", {})
    with pytest.raises(UserError, match="policy 'c' is one of the run's, and trains"):
        add_policy(resting, "c", {})


@pytest.mark.slow
def test_only_adapters_of_a_run_with_several_policies_come_and_go(tmp_path: Path) -> None:
    for name, cfg, message in (
        ("one", fleet(), "expected the run of an experiment with `policies`"),
        ("whole", tiny_wholes({"a": {}}), "whole models do not come and go"),
    ):
        with RunDirectory.open(tmp_path / name, to_text(cfg)) as whole, pytest.raises(UserError, match=message):
            add_policy(whole, "c", {})


HOSTILE = (
    {"event": "add", "policy": "../../up", "edits": {}},
    {"event": "add", "policy": "c", "edits": {"seed": 1}},
    {"event": "add", "policy": "c", "edits": ["seed"]},
    {"event": "add", "policy": 3, "edits": {}},
    {"event": "run", "policy": "c"},
    {"policy": ["c"]},
)


def test_rows_that_are_none_of_ours_count_for_nothing(tmp_path: Path) -> None:
    whole = RunDirectory.attach(tmp_path)
    changes_path(whole).write_text("".join(json.dumps(row) + "\n" for row in HOSTILE))
    found = read_changes(whole)
    assert not found.joined and not found.last
    cfg = fleet("a")
    assert with_joined(cfg, whole) is cfg


@pytest.mark.slow
def test_an_edit_of_a_strangers_file_names_no_code_that_is_not_trusted(tmp_path: Path) -> None:
    whole = RunDirectory.attach(tmp_path)
    row = {"event": "add", "policy": "c", "edits": {"verifier.scorer.function": "os:system"}}
    changes_path(whole).write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"policies\['c'\].*os"):
        run(tmp_path / "run", with_joined(fleet("a"), whole))


def test_a_file_that_is_spoilt_is_named_and_those_who_follow_it_keep_what_they_know(tmp_path: Path) -> None:
    whole = RunDirectory.attach(tmp_path)
    wanted = WantedChanges(whole, ("a",))
    assert wanted() == {}
    changes_path(whole).write_text('{"event": "stop", "policy": "a"}\n{"event": "stop", "policy": "gone"}\n')
    assert wanted() == {}, "its directory is not open yet"
    for name in ("a", "gone"):
        policy_run(whole, name).path.mkdir(parents=True)
        policy_run(whole, name).config_path.write_text("x")
    before = wanted()
    assert before.keys() == {"a"} and before["a"].stopped and before["a"].number == 1
    with changes_path(whole).open("a") as file:
        file.write("no JSON}\n")
    assert wanted() == before
    with pytest.raises(UserError, match=r"policies.jsonl, line 3 is not JSON"):
        read_changes(whole)
