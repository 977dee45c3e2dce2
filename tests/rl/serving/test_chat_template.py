"""Conversations as text."""

import re

import pytest

from mesh import UserError
from rl.serving.chat_template import ChatTemplate
from rl.tasks.mixture import encode_prompt
from tests.rl.serving.running import TOKENIZER


@pytest.mark.parametrize("question", ["", "2 + 2?", "a {content} in it", "zwei\nZeilen €"])
def test_a_single_user_message_is_what_training_asks(question: str) -> None:
    text = ChatTemplate.Config().build().render([("user", question)])
    assert [TOKENIZER.bos, *TOKENIZER.encode(text)] == encode_prompt(question, TOKENIZER).tolist()


def test_messages_are_joined_in_their_roles_forms() -> None:
    template = ChatTemplate.Config(roles={"user": "<u>{content}</u>", "assistant": "<a>{content}</a>"}, opening="<a>")
    text = template.build().render([("user", "1"), ("assistant", "2"), ("user", "3")])
    assert text == "<u>1</u><a>2</a><u>3</u><a>"


def test_an_unknown_role_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown role 'usr'; did you mean 'user'"):
        ChatTemplate.Config().build().render([("usr", "?")])


@pytest.mark.parametrize(
    ("roles", "message"),
    [({}, "ChatTemplate.roles: expected a form for each role"), ({"user": "no place"}, "with {content} in it once")],
)
def test_a_template_that_loses_what_is_said_is_refused(roles: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        ChatTemplate.Config(roles=roles).build()
