"""A worker delivers what was leased, scored in the right places, and can be lost at any moment."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from axlearn_like.tokenizers.protocol import answer_text
from mesh import UserError
from rl.controller.controller import Controller
from rl.controller.fair_share import FairShare
from rl.controller.leasing import LEASES_PER_POLICY
from rl.experiment import RLExperiment
from rl.parameter_server.client import connect_local
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.pull.prefetcher import Prefetcher
from rl.protocol.messages import Group, PullStats, Score
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.request import Request
from rl.rollout.worker import RolloutWorker
from rl.rollout.worker_policy import WorkerFeatures, WorkerPolicy, WorkerServices
from rl.runtime.policies.controllers import Controllers
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from tests.rl.parameter_server.small import publish
from tests.rl.tiny import ascii_share, tiny_experiment, tiny_params

CFG = tiny_experiment(staleness=1)
EXPERIMENT: RLExperiment = CFG.build()
WEIGHTS = [tiny_params(CFG.policy, seed) for seed in range(2)]  # pyright: ignore


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return EXPERIMENT.make_engine()


class Place:
    """A controller and a parameter server with version 0 in a run directory, and workers to come."""

    def __init__(self, path: Path, engine: RolloutEngine, number: int = 0):
        """`number`: of the policy, which has weights of its own."""
        path.mkdir(exist_ok=True)
        self.run = RunDirectory.attach(path)
        self.clock = Clock()
        self.controller: Controller = EXPERIMENT.controller_cfg.build(
            clock=self.clock, events=EventLog(self.run.events_path), first_lease=number * LEASES_PER_POLICY
        )
        self.weights = connect_local(EXPERIMENT.make_parameter_server())
        publish(self.weights, WEIGHTS[number], 0)
        self.controller.begin(0, 0)
        self._engine = engine

    def prefetcher(self) -> Prefetcher:
        receiver = self.weights.receiver(self._engine.runner.weights_like)
        return Prefetcher(receiver, self._engine.place, newest=False, background=False)

    def worker(self, name: str, weights: Any = None, verifier: Any = None, demonstrations: Any = None) -> RolloutWorker:
        self._engine.invalidate_weights()  # as in a new process
        services = WorkerServices(
            self.controller,
            weights or self.prefetcher(),
            verifier or EXPERIMENT.make_verifier(),
            EventLog(self.run.events_path),
            pull_timeout=0.0,
        )
        features = WorkerFeatures(demonstrations=demonstrations)
        policy = WorkerPolicy(EXPERIMENT.tokenizer, CFG.seed, services, features)
        return RolloutWorker(name, self._engine, {"": policy})

    def events(self, event: str) -> list[dict[str, Any]]:
        return [row for row in read_rows(self.run.events_path) if row["event"] == event]

    def batch(self, step: int = 0) -> list[Group]:
        batch = self.controller.next_batch(step)
        assert batch is not None
        return batch


@pytest.fixture
def place(tmp_path: Path, engine: RolloutEngine) -> Place:
    return Place(tmp_path, engine)


def same(one: list[Group], other: list[Group]) -> bool:
    """Prompts, tokens, log-probabilities, versions and scores, to the bit."""

    def plain(groups: list[Group]) -> list[Any]:
        return [
            (g.prompt.id, r.sample_id, [a.tobytes() for a in (r.tokens, r.logprobs, r.versions)], s.reward, s.status)
            for g in groups
            for r, s in zip(g.rollouts, g.scores, strict=True)
        ]

    return plain(one) == plain(other)


@pytest.fixture(scope="module")
def undisturbed(engine: RolloutEngine, tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    """Batch 0 as one worker makes it that nothing happens to."""
    place = Place(tmp_path_factory.mktemp("undisturbed"), engine)
    worker = place.worker("w")
    while worker.run_once():
        pass
    return place.batch()


@pytest.mark.slow
def test_groups_hold_the_samples_of_their_prompt_with_their_own_scores(place: Place):
    worker = place.worker("w")
    assert [worker.run_once() for _ in range(5)] == [True] * 4 + [False]  # two steps of two leases
    for step in range(2):
        if step:
            place.controller.consumed(0)
        batch = place.batch(step)
        assert [g.prompt.id for g in batch] == [p.id for i in range(2) for p in place.controller.prompts(step, i)]
        for group in batch:
            assert [r.prompt_id for r in group.rollouts] == [group.prompt.id] * CFG.samples_per_prompt
            assert [r.sample_id for r in group.rollouts] == list(range(CFG.samples_per_prompt))
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                answer = answer_text(EXPERIMENT.tokenizer, rollout.tokens.tolist())
                assert score.reward == ascii_share(group.prompt.id, answer)
                assert np.all(rollout.versions == 0)
        assert len({score.reward for group in batch for score in group.scores}) > 3


class _NoVerifier:
    def score(self, *answers: Any) -> list[Score]:
        raise RuntimeError("no verifier")


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_whole_models_take_turns_on_one_engine_and_have_the_rollouts_of_each_alone(
    fails: bool, tmp_path: Path, engine: RolloutEngine, undisturbed: list[Group]
):
    places = {name: Place(tmp_path / name, engine, number) for number, name in enumerate(("a", "b"))}
    controllers = Controllers({name: place.controller for name, place in places.items()}, FairShare(quantum=1))
    policies: dict[str, Any] = {}
    for name, place in places.items():
        verifier: Any = _NoVerifier() if fails and name == "b" else EXPERIMENT.make_verifier()
        services = WorkerServices(controllers, place.prefetcher(), verifier, EventLog(place.run.events_path))
        policies[name] = WorkerPolicy(EXPERIMENT.tokenizer, CFG.seed, services)
    engine.invalidate_weights()
    worker = RolloutWorker("w", engine, policies)
    while worker.run_once():
        pass
    assert same(places["a"].batch(), undisturbed)
    assert controllers.failed() == ({"b": "no verifier"} if fails else {})
    assert [len(place.events("pull")) for place in places.values()] == [1, 1], "weights stay while the other one draws"
    if not fails:
        assert len(places["b"].events("swap")) > 1
        alone = Place(tmp_path / "alone", engine, 1)
        other = alone.worker("w")
        while other.run_once():
            pass
        assert same(places["b"].batch(), alone.batch()) and not same(places["b"].batch(), undisturbed)


def test_a_worker_pulls_a_version_once_and_logs_its_spans(place: Place):
    worker = place.worker("w")
    while worker.run_once():
        pass
    (pull,) = place.events("pull")
    nbytes = sum(array.nbytes for array in jax.tree.leaves(WEIGHTS[0]))
    assert (pull["role"], pull["version"], pull["nbytes"]) == ("w", 0, nbytes)
    place.batch()
    place.controller.consumed(0)
    publish(place.weights, WEIGHTS[1], 1)
    place.controller.published(1)
    while worker.run_once():
        pass
    assert [row["version"] for row in place.events("pull")] == [0, 1]
    spans = place.events("generate")
    assert [(row["step"], row["version"]) for row in spans] == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 1), (2, 1)]
    made = sum(len(r.tokens) for group in place.batch(1) for r in group.rollouts)
    assert sum(row["tokens"] for row in spans if row["step"] == 1) == made
    assert [row["step"] for row in place.events("score")] == [0, 0, 1, 1, 2, 2]


def test_what_a_dead_worker_had_leased_is_made_again_to_the_bit(place: Place, undisturbed: list[Group]):
    lost = place.controller.lease("victim")
    assert lost is not None
    survivor = place.worker("survivor")
    assert survivor.run_once()
    place.controller.release("victim", "worker died")
    while survivor.run_once():
        pass
    assert same(place.batch(), undisturbed)


# ---- asked to leave


class Called:
    """A condition that holds from the n-th call on."""

    def __init__(self, times: int):
        self.left = times

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture(scope="module")
def stepwise() -> RolloutEngine:
    """An engine that draws two tokens a dispatch, of six."""
    return EXPERIMENT.make_engine(steps_per_dispatch=2)


@pytest.mark.slow
@pytest.mark.parametrize("patience", [3, 4, 5, 6])
def test_a_worker_that_must_go_hands_back_what_it_has_and_the_next_goes_on_from_there(
    patience: int, tmp_path: Path, stepwise: RolloutEngine, undisturbed: list[Group]
):
    place = Place(tmp_path, stepwise)
    place.worker("leaver").run(stop=Called(patience))
    status = place.controller.status()
    assert (status["leased"], status["workers"], status["expired"]) == (0, [], 0)
    handed = sum(row["tokens"] for row in place.events("handed_back"))
    other = place.worker("other")
    while other.run_once():
        pass
    assert same(place.batch(), undisturbed)
    whole = sum(len(rollout.tokens) for group in place.batch() for rollout in group.rollouts)
    spans = [row for row in place.events("generate") if row["step"] == 0]
    assert sum(row["tokens"] for row in spans) == whole  # none was drawn twice
    assert sum(row["tokens"] for row in spans if row["role"] == "leaver") == handed
    assert patience < 5 or handed > 0


def test_a_worker_asked_to_leave_before_it_begins_takes_no_lease(place: Place):
    place.worker("w").run(stop=lambda: True)
    assert place.controller.status()["pending"] == 0 and place.events("handed_back") == []


def test_when_there_is_no_more_time_whole_rollouts_are_handed_back_from_another_thread(
    place: Place, undisturbed: list[Group]
):
    verifier = Hesitant(InlineVerifier.Config(scorer=FunctionScorer.Config(function=ascii_share)))
    worker = place.worker("w", verifier=verifier)
    verifier.meanwhile = worker.abandon
    assert worker.run_once()
    (row,) = place.events("handed_back")
    assert place.controller.status()["rejected"] == 1  # its own report, which came too late
    (span,) = place.events("generate")
    assert row["tokens"] == span["tokens"] > 0
    other = place.worker("other")
    while other.run_once():
        pass
    assert same(place.batch(), undisturbed)
    assert [row["tokens"] for row in place.events("generate")][1] == 0  # they only had to be scored


@pytest.mark.slow
def test_a_worker_that_hears_that_its_lease_is_void_drops_the_work(tmp_path: Path, undisturbed: list[Group]):
    experiment = tiny_experiment(staleness=1, engine=RolloutEngine.Config(max_num_seqs=8, steps_per_dispatch=2)).build()
    experiment.controller_cfg.lease_seconds = 1e-9  # it asks after every dispatch
    place = Place(tmp_path, experiment.make_engine())
    place.controller = experiment.controller_cfg.build(clock=lambda: 0.0, events=EventLog(place.run.events_path))
    place.controller.begin(0, 0)
    worker = place.worker("slow", weights=Slow(place.prefetcher(), lambda: place.controller.join("slow")))
    assert worker.run_once()
    assert place.controller.status()["rejected"] == 0 and place.events("score") == []
    assert worker.run_once() and len(place.events("score")) == 1
    assert place.events("generate")[0]["tokens"] < place.events("generate")[1]["tokens"]
    while worker.run_once():
        pass
    assert same(place.batch(), undisturbed)


def test_weights_of_a_trainer_that_began_again_are_pulled_again_although_the_version_is_in_place(place: Place):
    """The trainer may have died before it saved, and made other weights of the same version since."""
    worker = place.worker("w")
    assert worker.run_once()
    place.weights.directory.rewind(-1)
    other = tiny_params(CFG.policy, 7)  # pyright: ignore
    publish(place.weights, other, 0)
    place.controller.begin(0, 0)
    while worker.run_once():
        pass
    assert [row["version"] for row in place.events("pull")] == [0, 0]
    engine = EXPERIMENT.make_engine()
    engine.set_weights(other, 0)
    requests = [Request(prompt, CFG.samples_per_prompt, CFG.seed) for prompt in place.controller.prompts(0, 0)]
    expected = [rollout.tokens.tobytes() for rollout in engine.generate(requests)]
    assert [r.tokens.tobytes() for group in place.batch()[:2] for r in group.rollouts] == expected


def test_the_first_rollouts_accepted_are_told_with_the_seconds_since_the_start(place: Place):
    worker = place.worker("w")
    while worker.run_once():
        pass
    (row,) = place.events("joined")
    assert row["role"] == "w" and 0 < row["join_s"] < 300


class Slow:
    """A prefetcher whose first pull takes so long that the lease that needs it goes to another worker."""

    def __init__(self, prefetcher: Prefetcher, meanwhile: Callable[[], None]):
        self._prefetcher = prefetcher
        self._meanwhile: Callable[[], None] | None = meanwhile

    def take(self, version: int, timeout: float = 0.0) -> tuple[PlacedWeights, PullStats]:
        if self._meanwhile is not None:
            self._meanwhile, meanwhile = None, self._meanwhile
            meanwhile()
        return self._prefetcher.take(version, timeout)


def test_a_lease_that_expired_during_generation_is_dropped_before_scoring(place: Place, undisturbed: list[Group]):
    taken = []

    def meanwhile() -> None:
        place.clock.now += CFG.controller.lease_seconds
        taken.append(place.controller.lease("faster"))

    worker = place.worker("slow", weights=Slow(place.prefetcher(), meanwhile))
    assert worker.run_once()
    assert (len(place.events("generate")), len(place.events("score"))) == (1, 0)
    assert place.controller.status()["rejected"] == 1
    place.controller.release("faster", "worker died")
    while worker.run_once():
        pass
    assert same(place.batch(), undisturbed)


class Hesitant(InlineVerifier):
    """A scorer that is once so slow that the lease goes to another worker."""

    meanwhile: Callable[[], None] | None = None

    def score(self, problem_ids: Sequence[int], answers: Sequence[str]) -> list[Score]:
        if self.meanwhile is not None:
            self.meanwhile, meanwhile = None, self.meanwhile
            meanwhile()
        return super().score(problem_ids, answers)


def test_a_lease_that_expired_during_scoring_is_counted_once(place: Place, undisturbed: list[Group]):
    """Both workers deliver the same work item; the first report counts."""
    other = place.worker("faster")

    def meanwhile() -> None:
        place.clock.now += CFG.controller.lease_seconds
        while other.run_once():
            pass

    verifier = Hesitant(InlineVerifier.Config(scorer=FunctionScorer.Config(function=ascii_share)))
    verifier.meanwhile = meanwhile
    assert place.worker("slow", verifier=verifier).run_once()
    status = place.controller.status()
    assert (status["rejected"], status["expired"], status["verified"]) == (1, 1, 4)
    assert same(place.batch(), undisturbed)


def test_a_version_that_is_not_to_be_had_frees_the_lease_and_ends_the_worker_in_the_end(place: Place):
    place.weights.directory.rewind(-1)
    worker = place.worker("w")
    for _ in range(4):
        assert worker.run_once()
        assert place.controller.status()["leased"] == 0
    assert "version 0 not published" in place.events("pull")[0]["error"]
    publish(place.weights, WEIGHTS[0], 0)
    assert worker.run_once() and place.controller.status()["verified"] == 1  # the trainer is back
    place.weights.directory.rewind(-1)
    again = place.worker("w")
    attempts = []
    with pytest.raises(WeightsError, match="version 0 not published"):
        while len(attempts) < 10:
            attempts.append(again.run_once())
    assert attempts == [True] * 4


def test_run_joins_works_and_ends_with_the_run(place: Place, undisturbed: list[Group]):
    lost = place.controller.lease("w")
    assert lost is not None
    thread = threading.Thread(target=place.worker("w").run)
    thread.start()
    batch = place.controller.next_batch(0, timeout=1e6)
    place.controller.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert batch is not None and same(batch, undisturbed)
    assert [row["lease"] for row in place.events("lease_expired")] == [lost.id]


@pytest.mark.slow
@pytest.mark.parametrize("swap", ["keep_cache", "recompute"])
def test_in_flight_newer_weights_are_taken_up_between_dispatches(
    tmp_path: Path, swap: Any, monkeypatch: pytest.MonkeyPatch
):
    """The trainer publishes version 1 while the worker draws."""
    engine = RolloutEngine.Config(max_num_seqs=8, steps_per_dispatch=2)
    experiment = tiny_experiment(engine=engine, stop_at_eos=False, swap=swap, evaluation=None).build()
    experiment.controller_cfg.weights = "in_flight"
    run = RunDirectory.attach(tmp_path)
    run.rollouts.mkdir()
    controller = experiment.make_controller(run)
    weights = connect_local(experiment.make_parameter_server())
    publish(weights, WEIGHTS[0], 0)
    questions: Iterator[Callable[[], None]] = itertools.chain(
        [lambda: None, lambda: publish(weights, WEIGHTS[1], 1)], itertools.repeat(lambda: None)
    )
    latest = weights.directory.latest
    monkeypatch.setattr(weights.directory, "latest", lambda: (next(questions)(), latest())[1])
    controller.begin(0, 0)
    worker = experiment.make_worker("w", run, controller, weights, experiment.make_verifier())
    assert worker.run_once()
    controller.published(1)
    assert worker.run_once()
    batch = controller.next_batch(0)
    assert batch is not None
    first, second = ([r for group in part for r in group.rollouts] for part in (batch[:2], batch[2:]))
    assert all(list(r.versions) == [0, 0, 0, 0, 1, 1] for r in first)
    assert all(r.tags == (("mixed-cache",) if swap == "keep_cache" else ()) for r in first)
    assert all(np.all(r.versions == 1) and r.tags == () for r in second)
    swaps = [row for row in read_rows(run.events_path) if row["event"] == "swap"]
    assert [(row["version"], row.get("swap")) for row in swaps] == [(0, None), (1, swap)]


def test_a_policy_whose_logits_are_not_numbers_ends_the_run_with_a_message(place: Place):
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), tiny_params(CFG.policy))  # pyright: ignore
    publish(place.weights, broken, 1)
    place.controller.begin(1, 1)
    with pytest.raises(UserError, match="drawing ended with 'error' after 0 tokens; are the policy's weights all num"):
        place.worker("w").run_once()
