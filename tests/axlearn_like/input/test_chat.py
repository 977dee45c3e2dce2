"""Conversations as examples: the assistant's turns are learned, behind the tokens with which a policy is asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.input import Chat, InputError, JsonLines
from axlearn_like.tokenizers.chat import encode_chat
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from tests.axlearn_like.tokenizers.golden_files import CONVERSATIONS, FOLDER

SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?<|turn_end|>"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes é."},
]


def tokenizer(template: str) -> HuggingFaceTokenizer.Config:
    path = str(FOLDER / "templates" / f"{template}.jinja")
    return HuggingFaceTokenizer.Config(path=str(FOLDER / "byte_level"), eos_token="<|turn_end|>", chat_template=path)


def encode(template: str, record: dict[str, Any], **fields: Any) -> tuple[list[int], list[bool]]:
    ids, mask = Chat.Config(**fields).build(tokenizer=tokenizer(template).build()).encode(record, "line 1")
    return list(ids), list(mask)


@pytest.mark.parametrize("template", ["llama3", "qwen25", "gemma"])
def test_answers_are_learned_behind_the_tokens_of_the_question(template: str) -> None:
    built = tokenizer(template).build()
    ids, learned = encode(template, {"messages": SAID})
    assert ids == encode_chat(built, SAID)
    for count, answer in ((2, "It is 2."), (4, "Yes é.")):
        asked = encode_chat(built, SAID[:count], add_generation_prompt=True)
        said = [*built.encode(answer), built.eos]
        assert ids[: len(asked)] == asked and not learned[len(asked) - 1]
        assert ids[len(asked) : len(asked) + len(said)] == said
        assert all(learned[len(asked) : len(asked) + len(said)])
    assert sum(learned) == len(built.encode("It is 2.")) + len(built.encode("Yes é.")) + 2


def test_a_question_and_its_answer_are_a_conversation() -> None:
    said = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is 2."}]
    turns = {"turns": ("question", "answer")}
    assert encode("qwen25", {"question": "1 + 1?", "answer": "It is 2."}, **turns) == encode(
        "qwen25", {"messages": said}
    )
    with pytest.raises(InputError, match=r"line 1: there is no field 'answer'.*answers"):
        encode("qwen25", {"question": "1 + 1?", "answers": ""}, **turns)


def test_tools_and_their_calls(tmp_path: Path) -> None:
    case = CONVERSATIONS["tools"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"said": case["messages"], "functions": case["tools"]}) + "\n")
    example = Chat.Config(messages="said", tools="functions")
    cache = str(tmp_path / "cache")
    source = JsonLines.Config(
        files=str(tmp_path / "a.jsonl"), tokenizer=tokenizer("qwen25"), example=example, cache=cache
    )
    found, built = source.build()[0], tokenizer("qwen25").build()
    text = built.decode(found["tokens"][found["loss_mask"]].tolist())
    call = '<call>\n{"name": "weather", "arguments": {"place": "Köln", "days": 2}}\n</call>'
    assert text == f"{call}Sunny."
    assert "Thanks" not in built.decode(found["tokens"].tolist())  # nothing is learned behind the last answer


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    thoughts = CONVERSATIONS["thoughts of two turns"]["messages"]
    with pytest.raises(InputError, match="line 1: the chat template writes what is before message 3 in another way"):
        encode("qwen3", {"messages": thoughts})
    ids, learned = encode("qwen3", {"messages": thoughts[:2]})
    assert "easy" in tokenizer("qwen3").build().decode([i for i, m in zip(ids, learned, strict=True) if m])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"message": SAID}, "no field 'messages'; did you mean 'message'"),
        ({"messages": "hi"}, "field 'messages': expected a list of messages, objects with role and content"),
        ({"messages": [{"content": "a"}]}, "field 'messages': expected a list of messages, objects with role"),
        ({"messages": [SAID[1], {"role": "assistant", "content": None}]}, "content of each message to be text"),
        ({"messages": SAID[:2]}, "no message of 'messages' is the assistant's"),
        (
            {"messages": [SAID[1], *SAID[1:3]]},
            "line 1: the chat template refuses .*: user and assistant must take turns",
        ),
    ],
)
def test_records_that_are_no_conversation_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode("gemma", record)
    with pytest.raises(InputError, match="needs a tokenizer with a chat template"):
        Chat.Config().build(tokenizer=None)
