"""The wire without the client: isolation, unknown paths, bodies that are no messages, sessions, restarts."""

import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb

from mesh import UserError
from rl.serving.service.messages import CreateModel, LoraSpec, ServiceError
from rl.serving.service.wire.tenants import Tenants, read_keys
from tests.rl.serving.service.wire.numbers import accepted, number_service
from tests.rl.serving.service.wire.running import Running, eventually, running_numbers

PROTOBUF = {"Content-Type": "application/x-protobuf"}


@pytest.fixture
def served() -> Iterator[Running]:
    with running_numbers() as served:
        yield served


def begin(served: Running, tenant: str = "alice") -> tuple[str, str]:
    """Open a session and create a model; returns their ids."""
    session = served.post("create_session", tenant=tenant)[1]["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "local/demo", "lora_config": {"rank": 1}}
    promise = served.post("create_model", body, tenant=tenant)[1]["request_id"]
    model = served.post("retrieve_future", {"request_id": promise}, tenant=tenant)[1]["model_id"]
    assert model == f"{session}:train:0"
    return session, model


def a_pass(model: str, seq: int = 1, tokens: tuple[int, ...] = (1,)) -> bytes:
    """Return the body of a forward_backward."""
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    row = message.data.add()
    row.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
    targets = row.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = pb.DTYPE_INT64, np.asarray(tokens, np.int64).tobytes()
    targets.shape.append(len(tokens))
    weights = row.loss_fn_inputs["weights"]
    weights.dtype, weights.dense = pb.DTYPE_FLOAT32, np.ones(len(tokens), np.float32).tobytes()
    weights.shape.append(len(tokens))
    return message.SerializeToString()


def test_ids_of_another_tenant_are_as_unknown_as_those_of_nobody(served: Running):
    session, model = begin(served)
    sampler = f"{session}:sample:0"
    path = f"tinker://{model}/weights/a"
    save = served.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})[1]["request_id"]
    assert served.post("retrieve_future", {"request_id": save}) == (200, {"path": path})
    opened = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    assert served.post("create_sampling_session", opened)[0] == 200
    own = served.post("create_session", tenant="bob")[1]["session_id"]
    prompt = {"chunks": [{"tokens": [1], "type": "encoded_text"}]}
    promise = f"{model}:1"

    def asks(session: str, model: str, sampler: str, path: str, promise: str) -> list[tuple[str, str, Any]]:
        return [
            ("POST", "session_heartbeat", {"session_id": session}),
            ("POST", "create_model", {"session_id": session, "model_seq_id": 1}),
            ("POST", "get_info", {"model_id": model}),
            ("POST", "forward_backward", a_pass(model)),
            ("POST", "optim_step", {"model_id": model, "seq_id": 1}),
            ("POST", "save_weights", {"model_id": model, "seq_id": 1, "path": "b"}),
            ("POST", "unload_model", {"model_id": model}),
            ("POST", "retrieve_future", {"request_id": promise}),
            ("POST", "cancel_future", {"request_id": promise}),
            ("POST", "asample", {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt}),
            ("GET", f"samplers/{sampler}", None),
            ("POST", "weights_info", {"tinker_path": path}),
            ("GET", f"training_runs/{model}", None),
            ("GET", f"training_runs/{model}/checkpoints", None),
            ("DELETE", path.replace("tinker://", "training_runs/").replace("/weights", "/checkpoints/weights"), None),
            ("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}}),
            (
                "POST",
                "create_sampling_session",
                {"session_id": own, "sampling_session_seq_id": 0, "model_path": path},
            ),
        ]

    nobody = "0123456789ab-0123456789abcdef"
    alien = asks(session, model, sampler, path, promise)
    unknown = asks(*(one.replace(session, nobody) for one in (session, model, sampler, path, promise)))
    for (how, verb, body), (_, same, nobodys) in zip(alien, unknown, strict=True):
        status, said = served.ask(how, verb, body, tenant="bob")
        expected, form = served.ask(how, same, nobodys, tenant="bob")
        assert (status, expected) == (404, 404), verb
        assert said["error"]["message"].replace(session, nobody) == form["error"]["message"]
        # The owner is answered.
        if verb.startswith(("get_info", "weights_info", "samplers", "training_runs")) and how != "DELETE":
            assert served.ask(how, verb, body)[0] == 200, verb
    assert accepted(served.folder) == [("create", 0), ("save", 1)]


@pytest.mark.parametrize("session", ["../../../etc", "", "x", "0123456789ab-", "0123456789AB-0123456789abcdef"])
def test_a_session_that_a_client_made_up_is_unknown(served: Running, session: str):
    body = {"session_id": session, "model_seq_id": 0, "base_model": "local/demo", "lora_config": {"rank": 1}}
    assert served.post("create_model", body)[0] == 404


def test_paths_that_are_not_there(served: Running):
    status, said = served.post("forward_backwards")
    assert status == 404
    assert "did you mean '/api/v1/forward_backward'" in said["error"]["message"]
    assert served.ask("GET", "forward_backward")[0] == 405
    assert served.ask("GET", "healthz", tenant=None) == (200, {"status": "ok"})


@pytest.mark.parametrize(("part", "said"), [("_engine", "generation"), ("_tasks.scheduler", "training")])
def test_the_health_of_a_service_whose_thread_has_ended_is_bad(served: Running, part: str, said: str):
    attrgetter(part)(served.service).close()
    status, body = served.ask("GET", "healthz", tenant=None)
    assert (status, body["error"]["message"]) == (503, f"the thread of {said} has ended; start the service again")


@pytest.mark.parametrize(
    ("tenant", "said"), [(None, "no API key"), ("tml-nobody", "is wrong"), ("tml-\xfc", "is wrong")]
)
def test_a_key_is_needed(served: Running, tenant: str | None, said: str):
    for verb in ("client/config", "create_session", "forward_backward", "retrieve_future", "telemetry"):
        status, body = served.post(verb, tenant=tenant)
        assert status == 401
        assert said in body["error"]["message"]


def test_bodies_that_are_no_requests(served: Running):
    _, model = begin(served)
    assert "no protobuf message" in served.post("forward_backward", b"\xff\xff\xff", **PROTOBUF)[1]["error"]["message"]
    assert served.post("optim_step", b"{")[1]["error"]["code"] == "invalid_json"
    assert "expected an object" in served.post("optim_step", [1])[1]["error"]["message"]
    assert "model_id: missing" in served.post("optim_step", {})[1]["error"]["message"]
    assert "seq_id: got 0" in served.post("optim_step", {"model_id": model, "seq_id": 0})[1]["error"]["message"]
    assert "seq_id: got 0" in served.post("forward_backward", a_pass(model, 0), **PROTOBUF)[1]["error"]["message"]
    step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rat": 1}}
    assert "unknown field 'adam_params.learning_rat'; did you mean 'learning_rate'" in outcome(
        served, "optim_step", step
    )


def outcome(served: Running, verb: str, body: Any) -> str:
    """Return the error of a request's promise."""
    status, promise = served.post(verb, body)
    assert status == 200
    result = served.post("retrieve_future", promise)[1]
    assert result["category"] == "user"
    return result["error"]


def test_bodies_that_are_packed_or_too_large_are_refused():
    with running_numbers(max_body=4096) as served:
        status, answer = served.post("forward_backward", b"", **PROTOBUF, **{"Content-Encoding": "zstd"})
        assert (status, "'zstd'; expected none" in answer["error"]["message"]) == (400, True)
        assert served.post("forward_backward", bytes(5000), **PROTOBUF)[0] == 413


@pytest.mark.parametrize(
    ("field", "change", "said"),
    [
        ("target_tokens", {"dense": b"123"}, "has 3 bytes, no multiple of 8"),
        ("target_tokens", {"shape": [2]}, "has shape [2] and 1 values"),
        ("target_tokens", {"shape": [-1]}, "has shape [-1] and 1 values"),
        ("target_tokens", {"dtype": pb.DTYPE_FLOAT32}, "expected int64"),
        ("target_tokens", {"sparse_csr": pb.SparseCsr(), "shape": [1, 10**12]}, "up to 64 targets"),
        (
            "target_tokens",
            {"sparse_csr": pb.SparseCsr(), "shape": [1, 2]},
            "do not fit a sparse matrix",
        ),
        (
            "target_tokens",
            {
                "sparse_csr": pb.SparseCsr(
                    values=np.array([3], np.int64).tobytes(),
                    crow_indices=np.array([0, 1], np.int64).tobytes(),
                    col_indices=np.array([2], np.int64).tobytes(),
                ),
                "shape": [1, 2],
            },
            "columns of a sparse matrix beyond 0 to 1",
        ),
        ("weights", {"dtype": pb.DTYPE_BFLOAT16, "shape": [1], "dense": b"12"}, "expected float32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(served: Running, field: str, change: Any, said: str):
    _, model = begin(served)
    message = pb.ForwardBackwardRequest.FromString(a_pass(model))
    tensor = message.data[0].loss_fn_inputs[field]
    changed = pb.Tensor(dtype=tensor.dtype, dense=tensor.dense, shape=tensor.shape)
    for name, value in change.items():
        if name == "shape":
            changed.ClearField("shape")
            changed.shape.extend(value)
        elif name == "sparse_csr":
            changed.sparse_csr.CopyFrom(value)
        else:
            setattr(changed, name, value)
    tensor.CopyFrom(changed)
    error = outcome(served, "forward_backward", message.SerializeToString())
    assert error.startswith(f"datum 0: loss_fn_inputs[{field!r}]")
    assert said in error


def test_images_are_refused_by_name(served: Running):
    _, model = begin(served)
    message = pb.ForwardBackwardRequest.FromString(a_pass(model))
    message.data[0].model_input.add().image.data = b"png"
    error = outcome(served, "forward_backward", message.SerializeToString())
    assert "datum 0: model_input chunk 1 is of kind image; expected tokens" in error


def test_settings_of_an_older_client_are_read(served: Running):
    _, model = begin(served)
    message = pb.ForwardBackwardRequest.FromString(a_pass(model))
    message.loss_fn, message.loss_fn_config["beta"] = "dro", 0.5
    inputs = message.data[0].loss_fn_inputs
    for name in ("logprobs", "advantages"):
        inputs[name].CopyFrom(inputs["weights"])
    del inputs["weights"]
    promise = served.post("forward_backward", message.SerializeToString(), **PROTOBUF)[1]
    result = pb.ForwardBackwardOutput.FromString(served.post("retrieve_future", promise)[1])
    assert result.metrics["beta:sum"] == 0.5


def test_a_large_answer_is_announced_by_its_size_once(served: Running):
    _, model = begin(served)
    message = pb.ForwardBackwardRequest.FromString(a_pass(model, 1, tuple(range(64))))
    message.data.extend([message.data[0]] * 5000)
    promise = served.post("forward_backward", message.SerializeToString(), **PROTOBUF)[1]
    ask = {"request_id": promise["request_id"], "allow_metadata_only": True}
    announced = served.post("retrieve_future", ask)[1]
    whole = served.post("retrieve_future", {**ask, "allow_metadata_only": False})[1]
    assert announced == {"status": "complete_metadata", "response_payload_size": len(whole)}
    assert len(pb.ForwardBackwardOutput.FromString(whole).loss_fn_outputs[0].fields["logprobs"].data) == 4 * 64 * 5001


# ---- sessions and restarts


def test_a_session_that_vanishes_has_its_models_saved_and_unloaded():
    with running_numbers(session_timeout=0.4) as served:
        session, model = begin(served)
        served.post("forward_backward", a_pass(model), **PROTOBUF)
        assert eventually(lambda: not served.service.models("alice"))
        assert [one.path for one in served.service.saved("alice")] == [f"tinker://{model}/weights/session-end"]
        assert served.post("session_heartbeat", {"session_id": session})[0] == 410
        status, said = served.post("optim_step", {"model_id": model, "seq_id": 2})
        assert (status, f"session {session!r} has ended" in said["error"]["message"]) == (410, True)
        # Accepted requests are answered, and saved weights go into a new session.
        assert served.post("retrieve_future", {"request_id": f"{model}:1"})[0] == 200
        fresh = served.post("create_session")[1]["session_id"]
        load = {"session_id": fresh, "model_seq_id": 0, "path": f"tinker://{model}/weights/session-end"}
        promise = served.post("load_weights", {**load, "optimizer": True})[1]
        assert served.post("retrieve_future", promise)[1]["path"] == load["path"]


def test_heartbeats_keep_a_session():
    with running_numbers(session_timeout=1.0) as served:
        session, _ = begin(served)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            assert served.post("session_heartbeat", {"session_id": session})[0] == 200
            time.sleep(0.1)
        assert len(served.service.models("alice")) == 1


def test_a_finished_session_gives_its_slots_back(served: Running):
    session, model = begin(served)
    assert served.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})[0] == 204
    assert eventually(lambda: served.service.models("alice") == {})
    assert served.post("get_info", {"model_id": model})[0] == 410


def test_promises_outlive_a_restart(tmp_path: Path):
    with running_numbers(tmp_path) as served:
        session, model = begin(served)
        pending = served.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})[1]
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "local/demo"}
        assert served.post("create_sampling_session", opened)[0] == 200
        ask = {"sampling_session_id": f"{session}:sample:0", "seq_id": 0}
        drawn = served.post("asample", {**ask, "prompt": {"chunks": [{"tokens": [1]}]}})[1]["request_id"]
    with running_numbers(tmp_path, session_timeout=1.0) as again:
        assert again.post("session_heartbeat", {"session_id": session})[0] == 200
        assert again.post("forward_backward", a_pass(model, 1), **PROTOBUF)[0] == 200
        assert again.post("retrieve_future", pending)[1]["metrics"] == {"grad_norm": 1.0}
        assert again.post("retrieve_future", {"request_id": drawn})[0] == 410  # the client asks for samples again
        assert again.post("retrieve_future", {"request_id": f"{model}:3"})[0] == 404
        assert eventually(lambda: not again.service.models("alice"))  # its client did not come back


# ---- limits and keys


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["alice"], "--key number 1: expected NAME=tml-KEY"),
        (["tml-secret"], "--key number 1: expected NAME=tml-KEY"),
        (["Alice=tml-a"], "expected NAME"),
        (["alice=abc"], "begins with 'tml-'"),
        (["alice=tml-"], "begins with 'tml-'"),
        (["alice=tml-a", "alice=tml-b"], "--key number 2: another tenant has this name"),
        (["alice=tml-a", "bob=tml-a"], "--key number 2: another tenant has this key"),
    ],
)
def test_wrong_keys_are_refused_and_not_shown(given: list[str], said: str):
    with pytest.raises(UserError) as refused:
        read_keys(given)
    assert said in str(refused.value)
    assert "secret" not in str(refused.value)


def test_keys_of_a_file(tmp_path: Any):
    file = tmp_path / "keys"
    file.write_text("# those of the lab\nalice=tml-a\n\nbob=tml-b\n")
    assert read_keys(["carol=tml-c"], file) == {"carol": "tml-c", "alice": "tml-a", "bob": "tml-b"}
    file.write_text("alice=tml-a\nno key\n")
    with pytest.raises(UserError, match="keys:2: expected NAME"):
        read_keys([], file)


def test_ids_of_one_name_begin_with_another_no_more_than_any(tmp_path: Path):
    service = number_service(tmp_path)
    tenants = Tenants({"a": "tml-1", "a/b": "tml-2"}, service)
    session = tenants.open_session("a")
    service.submit("a", f"{session}:train:0", 0, CreateModel(LoraSpec(1)))
    assert tenants.check_model("a", f"{session}:train:0")
    for tenant, id in [("a/b", f"{session}:train:0"), ("a", f"{session}:train:00"), ("a", f"{session}:train:-1")]:
        with pytest.raises(ServiceError, match="no model"):
            tenants.check_model(tenant, id)
    service.close()
