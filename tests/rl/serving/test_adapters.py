"""Adapters by model name over HTTP: listed, asked for, loaded and unloaded while the server answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.wrappers.adapters import Adapter, Factors, matrices
from mesh import UserError
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.request import Request
from rl.serving.adapters import ServedAdapters, check_name
from tests.rl.serving.running import MODEL, TOKENIZER, Running, as_prompt, make_engine, running
from tests.rl.tiny import tiny_policy

pytestmark = pytest.mark.slow

KEY = "secret"
AUTHORISED = {"Authorization": f"Bearer {KEY}"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def read(path: Path) -> Adapter:
    """Return a random adapter, whose seed is the directory's text."""
    rng = np.random.default_rng(int((path / "seed").read_text()))
    model = build_abstract(tiny_policy(TOKENIZER.vocab_size))

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return Adapter(
        {path: Factors(random(m.layers, m.inputs, 2), random(m.layers, 2, m.outputs)) for path, m in matrices(model)}
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("french", "poems", "sums"), 1):
        (folder / name).mkdir()
        (folder / name / "seed").write_text(str(seed))
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Running]:
    """A server with an adapter, and room for another one."""
    engine = make_engine(adapters=AdapterLimits(slots=2, rank=4))
    engine.load_adapter("french", read(root / "french"))
    adapters = ServedAdapters(MODEL, read, root, keyed=True)
    adapters.add("french", root / "french")
    with running(engine, api_key=KEY, adapters=adapters) as found:
        yield found


def completed(server: Running, model: str) -> str:
    answer = server.client(KEY).completions.create(model=model, prompt="hello", seed=5)
    assert answer.model == model
    return answer.choices[0].text


def administer(server: Running, path: str, **body: Any) -> tuple[int, str]:
    status, found, _ = server.post(path, body, **AUTHORISED)
    return status, found["error"]["message"] if isinstance(found, dict) else found


def test_a_request_chooses_by_model(server: Running):
    listed = server.client(KEY).models.list().data
    assert [(one.id, one.to_dict().get("parent")) for one in listed] == [(MODEL, None), ("french", MODEL)]
    assert server.client(KEY).models.retrieve("french").id == "french"
    assert completed(server, MODEL) != completed(server, "french") == completed(server, "french")
    with pytest.raises(openai.NotFoundError, match="no model 'frensh' here; .*did you mean 'french'") as caught:
        completed(server, "frensh")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_an_adapter_is_loaded_replaced_and_unloaded(server: Running, root: Path):
    french = completed(server, "french")
    assert administer(server, LOAD, lora_name="new", lora_path="poems") == (200, "adapter 'new' is loaded")
    poems = completed(server, "new")
    assert poems != french
    assert administer(server, LOAD, lora_name="new", lora_path="french") == (
        400,
        "lora_name: 'new' is loaded already; load_inplace=true replaces it",
    )
    status, _ = administer(server, LOAD, lora_name="new", lora_path=str(root / "french"), load_inplace=True)
    assert (status, completed(server, "new")) == (200, french)
    status, said = administer(server, LOAD, lora_name="third", lora_path="sums")
    assert status == 400 and said.startswith("adapter 'third': all 2 slots are taken, by french, new")
    assert administer(server, UNLOAD, lora_name="new") == (200, "adapter 'new' is unloaded")
    with pytest.raises(openai.NotFoundError):
        completed(server, "new")
    assert completed(server, "french") == french


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (LOAD, {"lora_name": "x", "lora_path": "../.."}, 400, "lora_path: expected a directory in the one that"),
    (LOAD, {"lora_name": "x", "lora_path": "/"}, 400, "lora_path: expected a directory in the one that"),
    (LOAD, {"lora_name": "x", "lora_path": "missing"}, 400, "lora_path: expected a directory in the one that"),
    (LOAD, {"lora_name": "x"}, 400, "lora_path: "),
    (LOAD, {"lora_name": "x\n", "lora_path": "sums"}, 400, "expected a name of 1 to 128 printable characters"),
    (LOAD, {"lora_name": MODEL, "lora_path": "sums"}, 400, "the base model has this name"),
    (UNLOAD, {"lora_name": MODEL}, 400, "is the base model"),
    (UNLOAD, {"lora_name": "french", "also": 3}, 400, "also"),
    (UNLOAD, {"lora_name": "frenk"}, 404, "did you mean 'french'"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_what_cannot_be_changed_is_refused(server: Running, path: str, body: dict[str, Any], status: int, message: str):
    found, said = administer(server, path, **body)
    assert (found, message in said) == (status, True), said
    assert server.post(path, body)[0] == 401  # without the key


def test_a_link_that_leads_out_of_the_directory_is_not_followed(server: Running, root: Path, tmp_path: Path):
    (tmp_path / "seed").write_text("3")
    (root / "link").symlink_to(tmp_path)
    status, said = administer(server, LOAD, lora_name="x", lora_path="link")
    assert (status, said[:10]) == (400, "lora_path:")


def test_without_a_directory_or_a_key_nothing_is_loaded(root: Path):
    def refusal(adapters: ServedAdapters) -> str:
        with pytest.raises(Exception, match="adapters are loaded|adapters are not loaded") as caught:
            adapters._check_allowed()
        return str(caught.value)

    assert "see --adapters-from" in refusal(ServedAdapters(MODEL, read, keyed=True))
    assert "see --api-key" in refusal(ServedAdapters(MODEL, read, root))
    with pytest.raises(UserError, match="the base model has this name"):
        check_name(MODEL, MODEL)


def test_the_engine_draws_what_the_server_sends(server: Running, root: Path):
    engine = make_engine(adapters=AdapterLimits(slots=2, rank=4))
    engine.load_adapter("one", read(root / "french"))
    (rollout,) = engine.generate([Request(as_prompt("hello"), seed=5, adapter="one")])
    assert completed(server, "french") == TOKENIZER.decode(rollout.tokens)
