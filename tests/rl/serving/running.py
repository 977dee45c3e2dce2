"""A server in this process over a policy of a few thousand random weights, and clients of it."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai
from prometheus_client.parser import text_string_to_metric_families

from axlearn_like.layers.base import Params
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.tokenizers.protocol import Tokenizer
from rl.protocol.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.serving.adapters import ServedAdapters
from rl.serving.input.prompts import prompt_id
from rl.serving.input.request import FAMILY
from rl.serving.server import Server, listen, url_of
from tests.rl.tiny import PHRASES, tiny_params, tiny_policy

MODEL = "tiny"
QUESTION: list[Any] = [{"role": "user", "content": "2+2?"}]
TOKENIZER = PhraseTokenizer.Config(phrases=PHRASES).build()


def make_engine(*, weights: bool = True, adapters: AdapterLimits | None = None, **changes: Any) -> RolloutEngine:
    """An engine with random weights; `changes` are fields of its config."""
    policy = tiny_policy(TOKENIZER.vocab_size)
    sizes = {"max_prompt_tokens": 24, "max_new_tokens": 24, "max_num_seqs": 8, "steps_per_dispatch": 4, **changes}
    cfg = RolloutEngine.Config(model=policy, stop_tokens=(TOKENIZER.eos,), **sizes)
    engine = cfg.build(decode=TOKENIZER.decode, adapters=adapters)
    if weights:
        engine.set_weights(make_params(0), 3)
    return engine


def make_params(seed: int) -> Params:
    """Weights for that engine."""
    return tiny_params(tiny_policy(TOKENIZER.vocab_size), seed=seed, scale=2.0)


class Running:
    """A running server, and clients of it."""

    def __init__(self, server: Server, engine: RolloutEngine, url: str):
        self.server, self.engine, self.url = server, engine, url

    def client(self, key: str = "none") -> openai.OpenAI:
        """Return the official client, without retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path: str, body: Any, /, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Return status, JSON (or text) and headers of a bare POST; `body` is JSON-able, or bytes as they are."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, raw, **{"Content-Type": "application/json", **headers})

    def ask(self, method: str, path: str, body: Any = b"", /, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Return status, JSON (or text) and headers (in lower case) of a request by the standard library's client."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = answer.headers.get_content_type() == "application/json"
            fields = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, json.loads(text) if is_json else text, fields
        finally:
            connection.close()


@contextmanager
def running(
    engine: RolloutEngine | None = None,
    api_key: str | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    adapters: ServedAdapters | None = None,
    **changes: Any,
) -> Iterator[Running]:
    """Serve until the end of the block; `changes` are fields of the server's config."""
    engine = engine or make_engine()
    cfg = Server.Config(**{"grace": 5.0, **changes})
    server = cfg.build(engine=engine, tokenizer=tokenizer, model=MODEL, api_key=api_key, adapters=adapters)
    with listen("127.0.0.1", 0) as listener:
        server.start(listener)
        try:
            yield Running(server, engine, url_of(listener))
        finally:
            server.stop()


def as_prompt(text: str) -> Prompt:
    """Return a text as the server's prompt."""
    tokens = np.asarray([TOKENIZER.bos, *TOKENIZER.encode(text)], np.int32)
    return Prompt(prompt_id(tokens), FAMILY, tokens)


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Return True if the condition came true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def metric(served: Running, name: str, **labels: str) -> float:
    """A figure of /metrics; 0 if it was never counted."""
    families = text_string_to_metric_families(served.ask("GET", "/metrics")[1])
    found = [s.value for family in families for s in family.samples if s.name == name and s.labels == labels]
    return found[0] if found else 0.0
