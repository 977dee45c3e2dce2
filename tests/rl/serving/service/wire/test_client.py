"""The official client against the wire: verbs, errors, retries that run once, tenants."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import tinker
from starlette.types import ASGIApp, Receive, Scope, Send
from tinker import types

from rl.serving.server import listen, url_of
from rl.serving.service.messages import ServiceBusy
from rl.serving.service.service import AdapterService
from rl.serving.service.wire.server import ServiceServer
from tests.rl.serving.service.wire.numbers import NumberEngine, accepted, number_service
from tests.rl.serving.service.wire.running import KEYS, Running, eventually, running_numbers

PROMPT = types.ModelInput.from_ints([1, 2, 3])


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running_numbers() as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Running) -> tinker.ServiceClient:
    return served.client()


@pytest.fixture(scope="module")
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="local/demo", rank=4).result()


def rest(served: Running, tenant: str = "alice") -> tinker.RestClient:
    return tinker.RestClient(base_url=served.url, api_key=KEYS[tenant])


def datum(tokens: list[int], targets: Any, **inputs: Any) -> types.Datum:
    given = {"target_tokens": targets, "weights": [1.0] * len(targets), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=given)


def test_a_loop_of_passes_steps_states_and_samples(client: tinker.ServiceClient):
    model = client.create_lora_training_client(base_model="local/demo", rank=4, seed=1).result()
    assert (model.get_info().lora_rank, model.get_info().model_data.model_name) == (4, "local/demo")
    passed = model.forward_backward([datum([1, 2], [2, 3]), datum([4], [5])], "cross_entropy")
    stepped = model.optim_step(types.AdamParams(learning_rate=0.1))  # sent before the first is awaited
    logprobs = [one["logprobs"].to_numpy().tolist() for one in passed.result().loss_fn_outputs]
    assert logprobs == [[-2, -3], [-5]]
    assert passed.result().metrics == {"loss:sum": 10.0}
    assert stepped.result().metrics == {"grad_norm": 3.0}
    evaluated = model.forward([datum([1], [2])], "cross_entropy").result()
    assert evaluated.loss_fn_outputs[0]["logprobs"].to_numpy() == pytest.approx([0.3 - 2])  # weight is 0.1 * 3 now

    path = model.save_state("first").result().path
    assert path == f"tinker://{model.model_id}/weights/first"
    sampler = model.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=3), topk_prompt_logprobs=2).result()
    assert [list(one.tokens) for one in drawn.sequences] == [[4, 5, 6]] * 2
    assert drawn.sequences[0].logprobs == pytest.approx([0.3] * 3)
    assert [place[0][0] for place in drawn.topk_prompt_logprobs or [] if place] == [2, 3]
    assert sampler.compute_logprobs(PROMPT).result() == [None, pytest.approx(0.3 - 2), pytest.approx(0.3 - 3)]

    again = client.create_training_client_from_state_with_optimizer(path).result()
    same = again.forward([datum([1], [2])], "cross_entropy").result()
    assert same.loss_fn_outputs[0]["logprobs"].to_numpy() == pytest.approx([0.3 - 2])
    saved = model.save_weights_for_sampler("for-sampler").result().path
    sampler = client.create_sampling_client(model_path=saved).result()
    assert sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result().sequences[0].logprobs is not None


def test_a_batch_in_many_chunks_arrives_with_the_first_last_and_runs_in_order():
    with running_numbers() as many:
        model = many.client().create_lora_training_client(base_model="local/demo", rank=1).result()
        rows = [datum([index % 90], [index % 90]) for index in range(2100)]  # chunks of 1024 rows
        result = model.forward_backward(rows, "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1.0)).result()
        moved = model.forward([datum([0], [0])], "cross_entropy").result()
        numbers = [number for kind, number in accepted(many.folder) if kind == "pass"]
    assert [one["logprobs"].to_numpy()[0] for one in result.loss_fn_outputs] == [-(n % 90) for n in range(2100)]
    assert moved.loss_fn_outputs[0]["logprobs"].to_numpy() == [2100.0]
    assert sorted(numbers) == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("rows", "loss", "config", "said"),
    [
        (
            [datum([1], [1]), datum([1, 100], [1, 2])],
            "cross_entropy",
            None,
            "datum 1: tokens[1] is 100",
        ),
        ([datum([1, 2], [1])], "cross_entropy", None, "datum 0: target_tokens has shape (1,); expected (2,)"),
        ([datum([1], [-1])], "cross_entropy", None, "datum 0: target_tokens[0] is -1"),
        ([datum([1] * 65, [1] * 65)], "cross_entropy", None, "datum 0 has 65 tokens; expected 1 to 64"),
        ([datum([], [])], "cross_entropy", None, "datum 0 has 0 tokens"),
        ([datum([1], [[1, 2]])], "cross_entropy", None, "datum 0: weights has shape (1,); expected (1, 2)"),
        ([datum([1], [1])], "custom", None, "there is no loss 'custom'"),
        ([datum([1], [1])], "ppo", {"clip_low_threshold": "x"}, "ppo.clip_low_threshold: got 'x'"),
    ],
)
def test_a_wrong_datum_is_named_and_later_requests_run(
    model: tinker.TrainingClient, rows: list[types.Datum], loss: Any, config: Any, said: str
):
    failing = model.forward_backward(rows, loss, config)
    after = model.forward([datum([1], [1])], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError) as failed:
        failing.result()
    assert said in str(failed.value)
    assert failed.value.category.value == "user"
    assert len(after.result().loss_fn_outputs) == 1


def test_targets_may_be_several_a_token_dense_or_sparse(model: tinker.TrainingClient):
    def row(targets: types.TensorData, weights: types.TensorData) -> types.Datum:
        inputs: Any = {"target_tokens": targets, "weights": weights}
        return types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)

    dense = types.TensorData(data=[3, 4, 5, 0], dtype="int64", shape=[2, 2])
    ones = types.TensorData(data=[1.0, 0.5, 1.0, 0.0], dtype="float32", shape=[2, 2])
    places: Any = {"shape": [2, 2], "sparse_crow_indices": [0, 2, 3], "sparse_col_indices": [0, 1, 0]}
    sparse = types.TensorData(data=[3, 4, 5], dtype="int64", **places)
    weights = types.TensorData(data=[1.0, 0.5, 1.0], dtype="float32", **places)
    rows = [row(dense, ones), row(sparse, weights), datum([1], [7])]
    found = model.forward(rows, "cross_entropy").result()
    shapes = [one["logprobs"].shape for one in found.loss_fn_outputs]
    assert shapes == [[2, 2], [2, 2], [1]]
    assert [one["logprobs"].data for one in found.loss_fn_outputs] == [[-3, -4, -5, 0], [-3, -4, -5, 0], [-7]]
    assert found.metrics["loss:sum"] == 2 * (3 + 2 + 5) + 7


def test_a_datum_without_targets_is_named(model: tinker.TrainingClient):
    inputs: Any = {"weights": [1.0, 1.0, 1.0]}
    only = types.Datum(model_input=PROMPT, loss_fn_inputs=inputs)
    with pytest.raises(tinker.RequestFailedError, match="datum 0: cross_entropy needs target_tokens; got weights"):
        model.forward_backward([only], "cross_entropy").result()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"base_model": "other/base", "rank": 1}, "'other/base' is not here; this service has 'local/demo'"),
        ({"base_model": "local/demo", "rank": 9}, "lora_config.rank: got 9; expected an integer from 1 to 8"),
        ({"base_model": "local/demo", "rank": 0}, "lora_config.rank: got 0"),
    ],
)
def test_a_model_beyond_the_service_is_refused(client: tinker.ServiceClient, asked: Any, said: str):
    with pytest.raises(tinker.RequestFailedError) as failed:
        client.create_lora_training_client(**asked).result()
    assert said in str(failed.value)


def test_another_optimizer_is_refused_and_the_next_step_runs(model: tinker.TrainingClient):
    with pytest.raises(tinker.RequestFailedError, match="this service has AdamW"):
        model.optim_step(types.DimuonParams(learning_rate=0.1)).result()
    with pytest.raises(tinker.RequestFailedError, match="learning_rate: got -1"):
        model.optim_step(types.AdamParams(learning_rate=-1.0)).result()
    model.forward_backward([datum([1], [1])], "cross_entropy")
    assert "grad_norm" in (model.optim_step(types.AdamParams()).result().metrics or {})


@pytest.mark.parametrize(
    ("prompt", "params", "more", "said"),
    [
        ([1, 2], {"max_tokens": 63}, {}, "max_tokens: got 63; expected an integer from 1 to 62"),
        ([], {"max_tokens": 1}, {}, "prompt: has no tokens"),
        ([100], {"max_tokens": 1}, {}, "got 100; expected token ids from 0 to 99"),
        ([1], {"temperature": -1.0}, {}, "sampling_params.temperature: got -1.0"),
        ([1], {"stop": [""]}, {}, "an empty text ends nothing"),
        ([1], {"max_tokens": 1}, {"topk_sample_logprobs": 2}, "topk_sample_logprobs: not supported"),
        ([1], {"max_tokens": 1}, {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k: not supported"),
    ],
)
def test_a_wrong_request_for_samples_is_named(
    client: tinker.ServiceClient, prompt: list[int], params: Any, more: Any, said: str
):
    sampler = client.create_sampling_client(base_model="local/demo").result()
    with pytest.raises(tinker.RequestFailedError) as failed:
        sampler.sample(types.ModelInput.from_ints(prompt), 1, types.SamplingParams(**params), **more).result()
    assert said in str(failed.value)


def test_requests_without_a_seed_have_one_each(client: tinker.ServiceClient, served: Running):
    sampler = client.create_sampling_client(base_model="local/demo").result()
    for seed in (None, None, None, 7):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1, seed=seed)).result()
    seeds = [seed for _, seed in engine(served.service).asked[-4:]]
    assert len(set(seeds)) == 4 and seeds[-1] == 7


def test_a_name_is_saved_once_and_an_unknown_path_is_said_to_be(client: tinker.ServiceClient):
    model = client.create_lora_training_client(base_model="local/demo", rank=1).result()
    path = model.save_state("once").result().path
    with pytest.raises(tinker.RequestFailedError, match="exists; expected another path"):
        model.save_state("once").result()
    model.save_state("once", overwrite=True).result()
    with pytest.raises(tinker.RequestFailedError, match="'../up' is no name"):
        model.save_state("../up").result()
    unknown = path.replace("once", "never")
    with pytest.raises(tinker.RequestFailedError, match="no path"):
        client.create_training_client_from_state(unknown).result()
    with pytest.raises(tinker.NotFoundError, match="no path"):
        client.create_sampling_client(model_path=unknown).result()


def test_lists_of_models_and_saved_states(client: tinker.ServiceClient, served: Running):
    model = client.create_lora_training_client(base_model="local/demo", rank=2).result()
    first, second = model.save_state("one").result().path, model.save_weights_for_sampler("two").result().path
    lists = rest(served)
    here = lists.list_checkpoints(model.model_id).result().checkpoints
    assert [(one.tinker_path, one.checkpoint_type) for one in here] == [(second, "sampler"), (first, "training")]
    run = lists.get_training_run(model.model_id).result()
    assert (run.lora_rank, run.base_model, run.model_owner) == (2, "local/demo", "alice")
    assert run.last_checkpoint is not None and run.last_checkpoint.tinker_path == first
    info = lists.get_weights_info_by_tinker_path(first).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("local/demo", 2, True)
    page = lists.list_user_checkpoints(limit=1, offset=1).result()
    assert len(page.checkpoints) == 1 and page.cursor is not None and page.cursor.total_count >= 2
    lists.delete_checkpoint_from_tinker_path(first).result()
    assert [one.tinker_path for one in lists.list_checkpoints(model.model_id).result().checkpoints] == [second]


# ---- retries


class Faulty:
    """Middleware that loses answers: each verb is handled; then the client gets 503, or half an answer, once."""

    def __init__(self, app: ASGIApp, verbs: tuple[str, ...], how: str, lost: list[str]):
        self._app, self._left, self._how, self._lost = app, set(verbs), how, lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        verb = scope.get("path", "").rpartition("/")[2]
        if verb not in self._left:
            return await self._app(scope, receive, send)
        self._left.discard(verb)
        self._lost.append(verb)

        async def swallow(message: Any) -> None:
            del message

        await self._app(scope, receive, swallow)
        status, length = (503, b"0") if self._how == "503" else (200, b"100")
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", length)]})
        if self._how == "drop":
            raise ConnectionResetError("a test loses this answer")
        await send({"type": "http.response.body", "body": b""})


VERBS = ("create_model", "forward_backward", "optim_step", "save_weights", "asample", "retrieve_future")


@pytest.mark.parametrize("how", ["503", "drop"])
def test_requests_whose_answers_are_lost_run_once(how: str, tmp_path: Path):
    lost: list[str] = []
    server = ServiceServer.Config(grace=0.2).build(service=number_service(tmp_path), keys=KEYS)
    server.app.asgi.add_middleware(Faulty, verbs=VERBS, how=how, lost=lost)
    with listen("127.0.0.1", 0) as listener:
        server.start(listener)
        try:
            client = tinker.ServiceClient(base_url=url_of(listener), api_key=KEYS["alice"])
            model = client.create_lora_training_client(base_model="local/demo", rank=1).result()
            model.forward_backward([datum([1], [1])], "cross_entropy").result()
            model.optim_step(types.AdamParams(learning_rate=1.0)).result()
            model.save_state("a").result()
            sampler = client.create_sampling_client(base_model="local/demo").result()
            sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result()
            moved = model.forward([datum([1], [0])], "cross_entropy").result()
            assert len(engine(server.service).asked) == 1
        finally:
            server.stop()
    assert sorted(lost) == sorted(VERBS)
    assert accepted(tmp_path) == [("create", 0), ("pass", 1), ("step", 2), ("save", 3), ("pass", 4)]
    assert moved.loss_fn_outputs[0]["logprobs"].to_numpy() == [1.0]  # one step, not two


def engine(service: AdapterService) -> NumberEngine:
    return cast(Any, service)._engine._engine


def test_a_busy_service_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    with running_numbers() as served:
        client = served.client()
        model = client.create_lora_training_client(base_model="local/demo", rank=1).result()
        sampler = client.create_sampling_client(base_model="local/demo").result()
        service, refused = served.service, list[str]()

        def busy_once(name: str, function: Any) -> Any:
            def call(*arguments: Any) -> Any:
                if name not in refused:
                    refused.append(name)
                    raise ServiceBusy("too many requests of yours wait")
                return function(*arguments)

            return call

        monkeypatch.setattr(service, "submit", busy_once("submit", service.submit))
        monkeypatch.setattr(service.samplers, "sample", busy_once("sample", service.samplers.sample))
        model.forward_backward([datum([1], [1])], "cross_entropy").result()
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result()
        assert refused == ["submit", "sample"]
        assert accepted(served.folder) == [("create", 0), ("pass", 1)] and len(engine(service).asked) == 1


def test_an_abandoned_sample_is_cancelled(monkeypatch: pytest.MonkeyPatch):
    with running_numbers() as served:
        cast(Any, served.service)._engine.pause().result(30)
        sampler = served.client().create_sampling_client(base_model="local/demo").result()
        asked, recall = threading.Event(), served.service.recall
        monkeypatch.setattr(served.service, "recall", lambda *of: (asked.set(), recall(*of))[1])
        future = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1))
        assert asked.wait(60)  # before, the client does not know the id of its request, and cancels nothing
        assert eventually(lambda: engine(served.service).busy)
        future.future().cancel()
        assert eventually(lambda: not engine(served.service).busy, 60)


def test_a_result_that_takes_longer_than_a_question_is_asked_for_again():
    with running_numbers(hold=0.2) as served:
        thread = cast(Any, served.service)._engine
        thread.pause().result(30)
        sampler = served.client().create_sampling_client(base_model="local/demo").result()
        waiting = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1))
        time.sleep(0.7)
        thread.resume()
        assert list(waiting.result().sequences[0].tokens) == [4]


# ---- tenants


def test_saved_states_of_another_tenant_are_not_there(client: tinker.ServiceClient, served: Running):
    path = client.create_lora_training_client(base_model="local/demo", rank=1).result().save_state("mine").result().path
    other = served.client("bob")
    with pytest.raises(tinker.RequestFailedError, match="no path"):
        other.create_training_client_from_state(path).result()
    with pytest.raises(tinker.NotFoundError, match="no path"):
        other.create_sampling_client(model_path=path).result()
    assert rest(served, "bob").list_user_checkpoints().result().checkpoints == []


def test_a_wrong_key_is_refused(served: Running):
    with pytest.raises(tinker.AuthenticationError, match="the API key is wrong"):
        tinker.RestClient(base_url=served.url, api_key="tml-nobody").get_server_capabilities().result()
