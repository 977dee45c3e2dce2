"""Several policies in one run: each has the bits that it has alone, whatever happens to the others or to a role."""

from pathlib import Path
from typing import Any

import pytest

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.operations import memory
from experiments.modifiers import low_rank
from mesh import UserError
from rl.experiment import RLExperiment
from rl.objective.presets import maxrl
from rl.runtime.policies.configs import policy_configs
from rl.runtime.run import RLRun
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, metrics, parameters
from tests.rl.tiny import ascii_share, tiny_experiment

pytestmark = pytest.mark.slow

POLICIES: dict[str, dict[str, Any]] = {
    "faster": {"learner.schedule.lr": 3e-2, "num_steps": 3, "prompts_per_step": 2, "groups_per_lease": 1},
    "first": {},
    "other-seed": {"seed": 7},
}


def fleet(policies: dict[str, dict[str, Any]], **changes: Any) -> RLExperiment.Config:
    """Return the tiny experiment with LoRA and these policies."""
    cfg = tiny_experiment(staleness=1, **changes)
    low_rank(cfg)
    return cfg.set(policies=policies)


def run(path: Path, cfg: RLExperiment.Config, **how: Any) -> dict[str, Any] | None:
    return RLRun(cfg.build(), say=lambda line: None).run(path, **{"runtime": "inprocess", "progress": False, **how})


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policies of a run of all."""
    path = tmp_path_factory.mktemp("together")
    report = run(path, fleet(POLICIES))
    assert report is not None and list(report["policies"]) == list(POLICIES)
    return path / "policies"


@pytest.mark.parametrize(
    "name", ["other-seed", *(pytest.param(one, marks=pytest.mark.full) for one in ("faster", "first"))]
)
def test_policies_that_train_together_have_the_bits_that_each_has_alone(
    together: Path, name: str, tmp_path: Path
) -> None:
    run(tmp_path, fleet({name: POLICIES[name]}))
    assert_same_outcome(together / name, tmp_path / "policies" / name)


def test_each_policy_begins_with_factors_of_its_own_and_makes_its_own_updates(together: Path) -> None:
    assert [len(metrics(together / name)) for name in POLICIES] == [3, 4, 4]
    pushed = [events(together / name, "push")[0] for name in ("first", "other-seed")]
    assert [row["version"] for row in pushed] == [0, 0]
    assert pushed[0]["checksum"] != pushed[1]["checksum"], "first factors, which each policy draws by its own seed"


@pytest.mark.full
def test_policies_join_and_leave_a_run_and_keep_their_bits(tmp_path: Path) -> None:
    first, others = {"first": POLICIES["first"]}, {name: POLICIES[name] for name in ("faster", "other-seed")}
    run(tmp_path / "grown", fleet(first))
    before = (tmp_path / "grown" / "policies" / "first" / "metrics.jsonl").read_bytes()
    report = run(tmp_path / "grown", fleet(first | others))
    assert report is not None and sorted(report["policies"]) == sorted(POLICIES)
    assert (tmp_path / "grown" / "policies" / "first" / "metrics.jsonl").read_bytes() == before, "nothing is made again"
    run(tmp_path / "grown", fleet({"faster": {**POLICIES["faster"], "num_steps": 4}, "first": {}}))
    run(tmp_path / "longer", fleet({"faster": {**POLICIES["faster"], "num_steps": 4}}))
    run(tmp_path / "other", fleet({"other-seed": POLICIES["other-seed"]}))
    for name, folder in (("faster", "longer"), ("other-seed", "other")):
        assert_same_outcome(*(tmp_path / one / "policies" / name for one in ("grown", folder)))


WHOLE: dict[str, dict[str, Any]] = {
    "math": {"prompts_per_step": 2, "groups_per_lease": 1},  # two leases a step, with one of the other between them
    "sql": {"seed": 7, "learner.schedule.lr": 3e-2, "controller.weights": "in_flight"},
}


@pytest.mark.full
def test_whole_models_that_train_together_are_each_the_run_that_it_would_be_as_the_only_policy(tmp_path: Path) -> None:
    cfg = tiny_experiment(staleness=1)
    report = run(tmp_path / "together", cfg.clone(policies=WHOLE))
    assert report is not None and list(report["policies"]) == list(WHOLE)
    for name, own in policy_configs(cfg.clone(policies=WHOLE)).items():
        run(tmp_path / name, own)
        assert_same_outcome(tmp_path / "together" / "policies" / name, tmp_path / name)
    pulled = [row["version"] for row in events(tmp_path / "together" / "policies" / "math", "pull")]
    assert pulled == sorted(set(pulled)), "weights stay while the other policy draws"


def test_whole_models_that_do_not_fit_together_are_refused_before_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_experiment()
    trainer = cfg.build().trainer_cfg
    state = trainer.program(trainer.check_sizes()).state
    one = 2 * memory.bytes_of_device(state["params"]) + memory.bytes_of_device(state["opt_state"])
    monkeypatch.setattr(memory, "device_memory", lambda device: one * 3 // 2)
    with pytest.raises(UserError, match=r"the train states of 2 policies do not fit: .* expected fewer of them"):
        run(tmp_path / "both", cfg.clone(policies=WHOLE))
    assert not events(tmp_path / "both" / "policies" / "math", "train_begin")


@pytest.mark.full
def test_whole_models_may_begin_with_weights_of_their_own(tmp_path: Path) -> None:
    cfg = tiny_experiment(num_steps=1, evaluation=None)
    run(tmp_path / "before", cfg)
    begin = StartFrom.Config(path=str(tmp_path / "before"))
    run(tmp_path / "together", cfg.clone(policies={"fresh": {}, "more": {"start_from": begin}}))
    found = {name: events(tmp_path / "together" / "policies" / name, "push") for name in ("fresh", "more")}
    learned = events(tmp_path / "before", "push")[1]["checksum"]
    assert found["more"][0]["checksum"] == found["fresh"][1]["checksum"] == learned


def test_only_adapters_are_published(together: Path) -> None:
    for name in POLICIES:
        path = together / name
        factors = [len(array) for name, array in parameters(path).items() if "lora" in name]
        assert {row["nbytes"] for row in events(path, "push")} == {sum(factors)}


@pytest.mark.full
def test_a_run_that_is_stopped_and_resumed_has_the_same_bits(together: Path, tmp_path: Path) -> None:
    def done() -> int:
        return sum(len(metrics(tmp_path / "parts" / "policies" / name)) for name in POLICIES)

    assert run(tmp_path / "parts", fleet(POLICIES), stop=lambda: done() >= 4) is None
    assert 4 <= done() < 11
    run(tmp_path / "parts", fleet(POLICIES))
    for name in POLICIES:
        assert_same_outcome(tmp_path / "parts" / "policies" / name, together / name)


def wrong_after(problem_id: int, answer: str) -> float:
    """Return a reward that MaxRL refuses from the third update on."""
    COUNT[0] += 1
    return -0.5 if COUNT[0] > 40 else ascii_share(problem_id, answer)


COUNT = [0]


@pytest.mark.full
def test_a_policy_that_fails_is_stopped_and_named_and_the_others_keep_their_bits(
    together: Path, tmp_path: Path
) -> None:
    wrong = InlineVerifier.Config(scorer=FunctionScorer.Config(function=wrong_after))
    COUNT[0] = 0
    report = run(tmp_path, fleet({**POLICIES, "wrong": {"objective": maxrl(), "verifier": wrong}}))
    assert report is not None and list(report["policies"]) == list(POLICIES) and list(report["failed"]) == ["wrong"]
    assert "-0.5" in report["failed"]["wrong"]
    for name in POLICIES:
        assert_same_outcome(tmp_path / "policies" / name, together / name)
    assert [row["policy"] for row in events(tmp_path, "policy_failed")] == ["wrong"]
