"""Conversations as the tokens that the policy continues."""

import re
from pathlib import Path

import pytest

from axlearn_like.tokenizers.chat import encode_chat
from mesh import UserError
from rl.serving.chat_template import ChatTemplate
from rl.tasks.encoding import encode_prompt
from tests.axlearn_like.tokenizers.golden_files import FOLDER, tokenizer
from tests.rl.serving.running import TOKENIZER

ASKED = [{"role": "user", "content": "2 + 2?"}]


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("question", ["", "2 + 2?", "a {content} in it", "zwei\nZeilen €"])
@pytest.mark.parametrize("own", ["", "qwen3"])
def test_a_single_user_message_is_what_training_asks(question: str, own: str) -> None:
    built = tokenizer("byte_level", own) if own else TOKENIZER
    ids = ChatTemplate.Config().build(tokenizer=built).encode(user(question))
    assert ids == encode_prompt(question, built).tolist()


def test_messages_are_joined_in_their_roles_forms() -> None:
    template = ChatTemplate.Config(roles={"user": "<u>{content}</u>", "assistant": "<a>{content}</a>"}, opening="<a>")
    turns = [*user("1"), {"role": "assistant", "content": "2"}, *user("3")]
    for built in (TOKENIZER, tokenizer("byte_level", "qwen3")):  # forms that were set go before the tokenizer's own
        built_template = template.build(tokenizer=built)
        assert built_template.render(turns) == "<u>1</u><a>2</a><u>3</u><a>"
        assert built.decode(built_template.encode(turns)) == "<u>1</u><a>2</a><u>3</u><a>"
        assert built.decode(built_template.encode(turns, add_generation_prompt=False)) == "<u>1</u><a>2</a><u>3</u>"


def test_a_jinja_file_goes_before_the_tokenizers_own() -> None:
    own, other = tokenizer("byte_level", "qwen3"), tokenizer("byte_level", "llama3")
    path = str(FOLDER / "templates" / "llama3.jinja")
    ids = ChatTemplate.Config(jinja=path).build(tokenizer=own).encode(ASKED)
    assert ids == encode_chat(other, ASKED, add_generation_prompt=True)
    assert ids != ChatTemplate.Config().build(tokenizer=own).encode(ASKED)


def test_an_unknown_role_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown role 'usr'; did you mean 'user'"):
        ChatTemplate.Config().build(tokenizer=TOKENIZER).encode([{"role": "usr", "content": "?"}])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools needs a Jinja template"),
        ({"documents": [{"text": "a"}]}, "documents needs a Jinja template"),
        ({"variables": {"a": 1}}, "chat_template_kwargs needs a Jinja template"),
        ({"continue_final_message": True}, "continue_final_message needs a Jinja template"),
    ],
)
def test_forms_of_roles_have_no_place_for_more(given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ChatTemplate.Config().build(tokenizer=TOKENIZER).encode(ASKED, **given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("roles", "message"),
    [({}, "ChatTemplate.roles: expected a form for each role"), ({"user": "no place"}, "with {content} in it once")],
)
def test_a_template_that_loses_what_is_said_is_refused(roles: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        ChatTemplate.Config(roles=roles).build(tokenizer=TOKENIZER)


def test_a_template_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{% if %}")
    for name, message in (("bad.jinja", "bad.jinja, line 1 of the template"), ("gone.jinja", "cannot be read")):
        with pytest.raises(UserError, match=message):
            ChatTemplate.Config(jinja=str(tmp_path / name)).build(tokenizer=TOKENIZER)
