"""Refusals of the server: fields, models, bodies, paths, keys, pages of other hosts, more requests than may wait."""

import asyncio
from typing import Any

import openai
import pytest

from tests.rl.serving.running import MODEL, QUESTION, Running, metric, running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temperature": -1}, "temperature"), ({"n": 0}, "n"), ({"prompt": "x" * 99}, "prompt"), ({"stop": ""}, "stop")],
)
def test_a_bad_field_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "hello", **fields})
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_bad_field_of_a_stream_is_refused_before_it_begins(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temprature.*did you mean 'temperature'"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, extra_body={"temprature": 1})


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.completions.create(model="gpt-4", prompt="hello")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "expected an object"),
        (b"\xff\xfe", "not JSON"),
        (b'{"temperature": NaN}', "NaN is not a number"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
    ids=["empty", "cut", "array", "bytes", "nan", "deep", "long"],
)
def test_a_body_that_is_no_json_object_is_refused(served: Running, body: bytes, said: str) -> None:
    status, answer, _ = served.post("/v1/completions", body)
    assert status == 400
    assert said in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_path_that_is_not_there_is_refused_with_the_nearest(served: Running) -> None:
    status, answer, _ = served.post("/v1/completion", {})
    assert status == 404
    assert "did you mean '/v1/completions'" in answer["error"]["message"]
    assert served.ask("GET", "/v1/completions")[0] == 405


def test_a_body_too_large_is_refused() -> None:
    with running(max_body=100) as small:
        status, answer, _ = small.post("/v1/completions", {"prompt": "x" * 200})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert small.post("/v1/completions", {"model": MODEL})[0] == 400
        chunked = iter([b'{"prompt": "', b"x" * 200, b'"}'])
        status, answer, _ = small.ask("POST", "/v1/completions", chunked, **{"Content-Type": "application/json"})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")


@pytest.mark.slow
def test_below_v1_the_key_is_asked_for() -> None:
    with running(api_key="secret") as locked:
        assert locked.client("secret").models.list().data[0].id == MODEL
        assert locked.client("secret").completions.create(model=MODEL, prompt="a", max_tokens=1).choices
        for wrong in ("secre", "secrets", "", "sécret"):
            headers = {"Authorization": f"Bearer {wrong}".encode().decode("latin-1")}
            for path in ("/v1/models", "/v1/models/tiny"):
                assert locked.ask("GET", path, **headers)[0] == 401
            status, answer, fields = locked.post("/v1/completions", {}, **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert fields["www-authenticate"] == "Bearer"
        assert locked.post("/v1/chat/completions", {})[0] == 401
        assert locked.ask("GET", "/health")[0] == locked.ask("GET", "/metrics")[0] == 200


FOREIGN: list[tuple[dict[str, str], int, str]] = [
    ({"Host": "evil.example"}, 403, "host_not_allowed"),  # DNS rebinding
    ({"Host": "127.0.0.1.evil.example:80"}, 403, "host_not_allowed"),
    ({"Host": "192.168.0.7"}, 403, "host_not_allowed"),
    ({"Host": "[::1"}, 403, "host_not_allowed"),
    ({"Origin": "https://evil.example"}, 403, "origin_not_allowed"),
    ({"Origin": "null"}, 403, "origin_not_allowed"),  # a file, or a frame in a sandbox
    ({"Content-Type": "text/plain"}, 415, "unsupported_media_type"),  # what a form can send
    ({"Content-Type": ""}, 415, "unsupported_media_type"),
]


@pytest.mark.parametrize(("headers", "status", "code"), FOREIGN, ids=lambda value: str(value)[:40])
def test_without_a_key_a_web_page_cannot_use_the_server(
    served: Running, headers: dict[str, str], status: int, code: str
) -> None:
    before = metric(served, "axl_requests_total", endpoint="completions", status=str(status))
    found, answer, _ = served.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1}, **headers)
    assert (found, answer["error"]["code"]) == (status, code)
    assert metric(served, "axl_requests_total", endpoint="completions", status=str(status)) == before + 1
    if status == 403:
        assert served.ask("GET", "/v1/models", **headers)[0] == 403


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "127.0.0.9", "[::1]:80"])
def test_a_loopback_host_and_origin_may_use_the_server(served: Running, host: str) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    headers = {"Host": host, "Origin": f"http://{host}", "Content-Type": "application/json; charset=utf-8"}
    assert served.post("/v1/completions", body, **headers)[0] == 200


def test_allowed_hosts_and_a_key_let_others_in() -> None:
    body, foreign = {"model": MODEL, "prompt": "a", "max_tokens": 1}, {"Host": "Box.example:80"}
    with running(allowed_hosts=("box.example",)) as open_to_one:
        assert open_to_one.post("/v1/completions", body, **foreign)[0] == 200
        assert open_to_one.post("/v1/completions", body, Origin="http://box.example", **foreign)[0] == 200
        assert open_to_one.post("/v1/completions", body, Host="other.example")[0] == 403
    with running(api_key="secret") as locked:
        headers = {"Authorization": "Bearer secret", "Content-Type": "text/plain", **foreign}
        assert locked.post("/v1/completions", body, **headers)[0] == 200


def test_a_key_may_have_any_letters() -> None:
    with running(api_key="schlüssel") as locked:
        header = "Bearer schlüssel".encode().decode("latin-1")
        assert locked.ask("GET", "/v1/models", Authorization=header)[0] == 200


def test_more_than_may_wait_are_told_when_to_come_back() -> None:
    async def ask(served: Running) -> tuple[list[Any], openai.RateLimitError]:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
        fields: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
        waiting = [asyncio.create_task(client.completions.create(**fields)) for _ in range(2)]
        while metric(served, "axl_requests_waiting") < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(**fields)
        served.server.engine.resume()
        return list(await asyncio.gather(*waiting)), refused.value

    with running(max_queue=2) as served:
        served.server.engine.pause().result(10)
        answers, refused = asyncio.run(ask(served))
        assert all(answer.choices for answer in answers)
        assert int(refused.response.headers["retry-after"]) >= 1
        assert "2 requests are waiting and 2 are the most" in refused.message
        assert served.client().completions.create(model=MODEL, prompt="hello", max_tokens=1).choices
