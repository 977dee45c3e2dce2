"""Engine and server with a Hugging Face tokenizer and its chat template, on random weights."""

from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.tokenizers.chat import encode_chat
from axlearn_like.tokenizers.conversation import Conversation
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from axlearn_like.tokenizers.protocol import completion_text
from rl.protocol.messages import Prompt
from rl.rollout.agent_loops.commands import Command, Completion, Generate, Observe
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from rl.serving.chat_template import ChatTemplate
from tests.axlearn_like.tokenizers.golden_files import FOLDER
from tests.rl.serving.running import MODEL, Running, running
from tests.rl.tiny import tiny_params, tiny_policy

pytestmark = pytest.mark.slow

TEMPLATE = str(FOLDER / "templates" / "qwen3.jinja")
PATH = str(FOLDER / "byte_level")
# More rows than ids: the policy draws ids that are no token, and those are no text.
TOKENIZER = HuggingFaceTokenizer.Config(path=PATH, eos_token="<|turn_end|>", chat_template=TEMPLATE).build()
ROWS = TOKENIZER.vocab_size + 8
QUESTION: Any = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    policy = tiny_policy(ROWS)
    sizes: Any = {"max_prompt_tokens": 64, "max_new_tokens": 96, "max_num_seqs": 4, "steps_per_dispatch": 4}
    decode = partial(completion_text, TOKENIZER)
    built = RolloutEngine.Config(model=policy, stop_tokens=TOKENIZER.stop_ids, **sizes).build(decode=decode)
    built.set_weights(tiny_params(policy, seed=0, scale=2.0), 3)
    return built


@pytest.fixture(scope="module")
def served(engine: RolloutEngine) -> Iterator[Running]:
    with running(engine, tokenizer=TOKENIZER) as server:
        yield server


def two_turns(talk: Conversation, completion: Completion) -> Generator[Command, Any, None]:
    yield Generate(max_new_tokens=20)
    talk.answered(completion.output_tokens)
    yield Observe(talk.extend([{"role": "user", "content": "<|turn_end|> Sure?"}]))
    yield Generate(max_new_tokens=20)
    talk.answered(completion.output_tokens[len(talk.tokens) - len(completion.prompt) :])


def test_turns_of_a_conversation_keep_the_tokens_drawn(engine: RolloutEngine) -> None:
    talk = Conversation(TOKENIZER, QUESTION, rewritten="keep")
    prompt = np.asarray(talk.tokens, np.int32)
    request = Request(Prompt(1, "talk", prompt), agent_loop=partial(two_turns, talk), stop=StopConditions((), (), 96))
    (rollout,) = engine.generate([request])
    assert talk.tokens == [*prompt.tolist(), *rollout.tokens.tolist()]
    assert rollout.action_mask.tolist() == [True] * 20 + [False] * (len(rollout.tokens) - 40) + [True] * 20
    given = rollout.tokens[~rollout.action_mask].tolist()
    assert TOKENIZER.decode(given) == "\nuser\n<|turn_end|> Sure?\nassistant\n"
    assert given.count(TOKENIZER.eos) == 2  # of the answer and of the question, but none that the user spelled


def test_a_chat_is_asked_by_the_template_and_its_tokens_bytes_are_its_text(served: Running) -> None:
    client = served.client()
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 5, "max_tokens": 90}
    chat = client.chat.completions.create(**options, logprobs=True)
    (choice,) = chat.choices
    assert chat.usage and chat.usage.prompt_tokens == len(encode_chat(TOKENIZER, QUESTION, add_generation_prompt=True))
    assert choice.logprobs and choice.logprobs.content and choice.message.content
    said = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    assert said.decode(errors="replace") == choice.message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options, stream=True)]
    assert "".join(pieces) == choice.message.content and len([piece for piece in pieces if piece]) > 3


def test_a_stop_string_across_tokens_ends_a_completion(served: Running) -> None:
    client = served.client()
    options: dict[str, Any] = {"model": MODEL, "prompt": "What", "seed": 7, "max_tokens": 90}
    whole = client.completions.create(**options).choices[0].text
    stop = next(whole[at : at + 3] for at in range(8, len(whole)) if "\ufffd" not in whole[at : at + 3])
    choice = client.completions.create(**options, stop=stop).choices[0]
    assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop"


def test_template_variables_tools_and_refusals_reach_the_template(served: Running) -> None:
    client = served.client()
    plain = encode_chat(TOKENIZER, QUESTION, add_generation_prompt=True)
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 1, "seed": 1}
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(**options, extra_body=thinking)
    expected = encode_chat(TOKENIZER, QUESTION, add_generation_prompt=True, variables={"enable_thinking": False})
    assert answer.usage and answer.usage.prompt_tokens == len(expected) > len(plain)
    status, body, _ = served.post(
        "/v1/chat/completions", {**options, "messages": [{"role": "assistant", "content": 1}]}
    )
    assert status == 400 and body["error"]["param"] == "messages[0].content"


def test_a_template_of_the_servers_own_ends_turns_too(engine: RolloutEngine, tmp_path: Path) -> None:
    """A policy that draws its end of turn stops there, though the engine's own ends are others."""
    (tmp_path / "other.jinja").write_text("{% for m in messages %}{{ m.content }}<|call_end|>{% endfor %}")
    with running(
        engine, tokenizer=TOKENIZER, template=ChatTemplate.Config(jinja=str(tmp_path / "other.jinja"))
    ) as server:
        stops = server.server.app._context.stop_tokens  # pyright: ignore[reportPrivateUsage]
    assert stops == (*TOKENIZER.stop_ids, TOKENIZER.token_id("<|call_end|>"))
