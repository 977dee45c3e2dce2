"""The verbs on the real engine and slots: isolation, sessions that vanish, restarts that lose nothing to the bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh import UserError
from rl.serving.service.messages import (
    CreateModel,
    LoadState,
    LossOutput,
    OpenSampler,
    Refusal,
    SaveState,
    ServiceError,
    TrainPass,
    UnknownId,
)
from rl.serving.service.service import AdapterService
from tests.rl.serving.service.sampled import sample_request
from tests.rl.serving.service.services import (
    ADAM,
    SLOTS,
    WAIT,
    A,
    B,
    ask,
    create,
    make_service,
    requests,
    rows,
    state_bits,
    train,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def service(tmp_path: Path) -> Iterator[AdapterService]:
    service = make_service(tmp_path)
    yield service
    service.close()


def bits(value: Any) -> Any:
    """Return an answer as something that compares to the bit."""
    if isinstance(value, LossOutput):
        return [one.tobytes() for one in value.logprobs], dict(value.metrics)
    return value


def answers(service: AdapterService, some: list[Any]) -> list[Any]:
    futures = [ask(service, request) for request in some]
    return [bits(future.result(WAIT)) for future in futures]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any], list[Any]]:
    """Answers of all requests, the models' final states, and samples of the sampler that was opened on the way."""
    service = make_service(tmp_path_factory.mktemp("undisturbed"), steps=1000)
    found = answers(service, requests())
    states = [state_bits(service, model) for model in (A, B)]
    drawn = samples(service)
    service.close()
    return found, states, drawn


def samples(service: AdapterService) -> list[Any]:
    request = sample_request(1, samples=2, max_new_tokens=8)
    both = (("t1", A), ("t2", B))
    futures = [service.samplers.sample(tenant, model.replace("train", "sample"), 0, request) for tenant, model in both]
    return [[(s.tokens.tobytes(), s.logprobs.tobytes()) for s in future.result(WAIT).rollouts] for future in futures]


@pytest.mark.usefixtures("service")
def test_it_has_its_folder_alone(tmp_path: Path):
    with pytest.raises(UserError, match="in use by another service"):
        make_service(tmp_path)


def test_models_side_by_side_have_the_bits_that_each_has_alone(
    tmp_path: Path, undisturbed: tuple[list[Any], list[Any], list[Any]]
):
    service = make_service(tmp_path)
    own = [place for place, request in enumerate(requests()) if request[1] == B]
    assert answers(service, [requests()[place] for place in own]) == [undisturbed[0][place] for place in own]
    assert state_bits(service, B) == undisturbed[1][1]
    assert undisturbed[1][0][0] != undisturbed[1][1][0]
    service.close()


@pytest.mark.parametrize("stops", [(3, 17), (8, 12), (25, 33)])
def test_a_service_that_stops_anywhere_goes_on_to_the_bit(
    tmp_path: Path, stops: tuple[int, int], undisturbed: tuple[list[Any], list[Any], list[Any]]
):
    """Stop twice with requests accepted and not run; what was accepted is not asked again, but can be recalled."""
    begun = 0
    for stop in stops:
        service = make_service(tmp_path)
        for request in requests()[begun:stop]:
            ask(service, request)
        service.close()
        begun = stop
    service = make_service(tmp_path, journal=1)  # every snapshot drops what is behind it
    rest = answers(service, requests()[begun:])
    assert rest == undisturbed[0][begun:]
    kept = 0
    for (tenant, model, seq, _), expected in zip(requests(), undisturbed[0], strict=True):
        if (future := service.recall(tenant, model, seq)) is not None:
            assert bits(future.result(WAIT)) == expected
            kept += 1
    assert kept >= 12, "answers since the last but one snapshot"
    again = requests()[-4:]
    assert answers(service, again) == undisturbed[0][-4:], "a repeat has the answer of the first, and changes nothing"
    assert [state_bits(service, model) for model in (A, B)] == undisturbed[1]
    assert samples(service) == undisturbed[2]
    service.close()


def test_a_session_that_vanishes_between_gradient_and_step_leaves_the_others_alone(
    tmp_path: Path, undisturbed: tuple[list[Any], list[Any], list[Any]]
):
    service = make_service(tmp_path)
    gone = "gone:train:0"
    create(service, "t3", gone, rank=4, seed=1)
    train(service, "t3", gone, 1, 1).result(WAIT)
    late = train(service, "t3", gone, 3, 1)  # the one before it never comes
    own = [place for place, request in enumerate(requests()) if request[1] == B]
    futures = [ask(service, requests()[place]) for place in own]
    for end in service.end_session("t3", "gone"):
        end.result(WAIT)
    with pytest.raises(ServiceError, match="was unloaded while requests before this one were missing"):
        late.result(WAIT)
    assert [bits(future.result(WAIT)) for future in futures] == [undisturbed[0][place] for place in own]
    assert state_bits(service, B) == undisturbed[1][1]
    assert service.sessions() == [("t2", "two")]
    (left,) = service.saved("t3")
    assert left.path == f"tinker://{gone}/weights/session-end"
    # Its gradient is there, too: a later session goes on where it ended.
    service.submit("t3", "later:train:0", 0, CreateModel(path=left.path, optimizer=True)).result(WAIT)
    assert service.submit("t3", "later:train:0", 1, ADAM).exception(WAIT) is None
    service.close()


def test_what_is_a_tenants_is_nobody_elses(service: AdapterService):
    create(service, "t1", A, rank=2).result(WAIT)
    path = service.submit("t1", A, 1, SaveState("w", "sampler_weights")).result(WAIT)["path"]
    service.samplers.open("t1", "one:sample:0", path)
    with pytest.raises(UnknownId):
        train(service, "t2", A, 2, 1)
    with pytest.raises(UnknownId):
        create(service, "t2", A, rank=2)
    with pytest.raises(UnknownId):
        service.samplers.open("t2", "two:sample:0", path)
    with pytest.raises(UnknownId):
        service.samplers.sample("t2", "one:sample:0", 0, sample_request(1))
    with pytest.raises(UnknownId):
        service.submit("t2", B, 0, CreateModel(path=path, optimizer=False))
    with pytest.raises(UnknownId):
        service.delete_saved("t2", path)
    assert service.recall("t2", A, 1) is None and not service.saved("t2") and not service.models("t2")
    assert [one.path for one in service.saved("t1")] == [path]


def test_errors_of_requests(service: AdapterService):
    create(service, "t1", A, rank=2).result(WAIT)
    with pytest.raises(ServiceError, match="no gradient"):
        service.submit("t1", A, 1, ADAM).result(WAIT)
    wrong = service.submit("t1", A, 2, TrainPass(A, tuple(rows(1)), "ppo", {}))
    with pytest.raises(ServiceError, match="ppo needs"):
        wrong.result(WAIT)
    service.submit("t1", A, 3, SaveState("x")).result(WAIT)
    with pytest.raises(ServiceError, match="exists; expected another path"):
        service.submit("t1", A, 4, SaveState("x")).result(WAIT)
    with pytest.raises(UnknownId, match="no path"):
        service.submit("t1", A, 5, LoadState(f"tinker://{A}/weights/y")).result(WAIT)
    refused = service.submit("t1", A, 6, Refusal("unreadable"))
    assert str(refused.exception(WAIT)) == "unreadable"
    with pytest.raises(ServiceError, match="rank"):
        create(service, "t1", B, rank=99).result(WAIT)
    for number in range(SLOTS - 1):
        create(service, "t1", f"more:train:{number}", rank=1).result(WAIT)
    with pytest.raises(ServiceError, match=f"all {SLOTS} slots"):
        create(service, "t1", "much:train:0", rank=1)
    service.unload("t1", "more:train:0").result(WAIT)
    create(service, "t1", "much:train:0", rank=1).result(WAIT)
    with pytest.raises(UnknownId):
        train(service, "t1", "more:train:0", 1, 1)


def test_errors_come_out_again_after_a_restart_though_files_have_changed(tmp_path: Path):
    """A load that failed fails again, though its path is there now; a save stays, though it was replaced since."""
    service = make_service(tmp_path)
    create(service, "t1", A, rank=2, seed=1).result(WAIT)
    create(service, "t1", B, rank=2, seed=2).result(WAIT)
    assert service.submit("t1", B, 1, LoadState(f"tinker://{A}/weights/x")).exception(WAIT) is not None
    train(service, "t1", A, 1, 1)
    service.submit("t1", A, 2, ADAM)
    service.submit("t1", A, 3, SaveState("x")).result(WAIT)
    service.submit("t1", B, 2, LoadState(f"tinker://{A}/weights/x")).result(WAIT)
    loaded = state_bits(service, B)
    train(service, "t1", A, 4, 2)
    service.submit("t1", A, 5, ADAM)
    service.submit("t1", A, 6, SaveState("x", overwrite=True)).result(WAIT)
    newest = state_bits(service, A)
    service.submit("t1", A, 7, SaveState("y")).result(WAIT)
    service.delete_saved("t1", f"tinker://{A}/weights/y")
    service.close()
    service = make_service(tmp_path)
    failed = service.recall("t1", B, 1)
    assert failed is not None and "no path" in str(failed.exception(WAIT))
    again = service.recall("t1", B, 2)
    assert again is not None and again.exception(WAIT) is None
    for seq in (5, 6, 7):  # replayed too, before states are read beside the thread that trains
        if (replayed := service.recall("t1", A, seq)) is not None:
            replayed.exception(WAIT)
    assert state_bits(service, B) == loaded
    assert [one.path for one in service.saved("t1")] == [f"tinker://{A}/weights/x"]
    service.submit("t1", "new:train:0", 0, CreateModel(path=f"tinker://{A}/weights/x", optimizer=True)).result(WAIT)
    assert state_bits(service, "new:train:0")[2] == newest[2]
    service.close()


def test_a_sampler_keeps_its_weights_whatever_becomes_of_model_and_path(service: AdapterService):
    def draw(sampler: str, number: int) -> bytes:
        request = sample_request(1, samples=1, max_new_tokens=12)
        return service.samplers.sample("t1", sampler, number, request).result(WAIT).rollouts[0].logprobs.tobytes()

    create(service, "t1", A, rank=2).result(WAIT)
    service.samplers.open("t1", "one:sample:9", None)
    base = draw("one:sample:9", 0)
    path = service.submit("t1", A, 1, SaveState("w", "sampler_weights")).result(WAIT)["path"]
    service.samplers.open("t1", "one:sample:0", path)
    assert draw("one:sample:0", 0) == base, "factors b are zero at first"
    for seq in (2, 4):
        train(service, "t1", A, seq, seq)
        service.submit("t1", A, seq + 1, ADAM)
    service.submit("t1", A, 6, SaveState("w", "sampler_weights", overwrite=True)).result(WAIT)
    service.samplers.open("t1", "one:sample:1", path)
    service.submit("t1", A, 7, OpenSampler("one:sample:2")).result(WAIT)
    service.unload("t1", A).result(WAIT)
    service.delete_saved("t1", path)
    assert draw("one:sample:0", 1) == base
    assert draw("one:sample:1", 0) == draw("one:sample:2", 0) != base
    assert service.samplers.path("t1", "one:sample:1") == path and service.samplers.path("t1", "one:sample:2") is None
    assert service.end_session("t1", "one") == []
    with pytest.raises(UnknownId):
        draw("one:sample:0", 2)


def test_an_id_that_is_used_again_is_another_model_after_a_restart_too(tmp_path: Path):
    service = make_service(tmp_path, steps=1, journal=1)
    for seed in (1, 2):
        create(service, "t1", A, rank=2, seed=seed).result(WAIT)
        for step in range(3):
            train(service, "t1", A, 2 * step + 1, seed + step)
            service.submit("t1", A, 2 * step + 2, ADAM).result(WAIT)
        last = state_bits(service, A)
        if seed == 1:
            service.unload("t1", A).result(WAIT)
    service.close()
    service = make_service(tmp_path, steps=1)
    again = service.recall("t1", A, 6)
    assert again is not None and again.exception(WAIT) is None
    assert state_bits(service, A) == last and last[0].seed == 2
    service.close()
