"""Conversations as token ids: a chat template's special tokens are tokens, those that a user spells are text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from axlearn_like.tokenizers.inside import either, encode_inside
from axlearn_like.tokenizers.jinja_template import Message, TemplateError
from axlearn_like.tokenizers.protocol import Template, Tokenizer

# Around a special token that somebody has spelled, while the template puts it where it belongs. From the private use
# area: no text means anything by them, and those in the messages are dropped.
_OPEN, _CLOSE = "\ue000", "\ue001"
_ANSWER = "\ue003an answer\ue003"  # placeholder that finds the template's text after an answer


class ChatOptions(TypedDict, total=False):
    """Options of a rendered conversation, see `Template.render`; `template` None: the tokenizer's own."""

    template: Template | None
    tools: Sequence[Message] | None
    documents: Sequence[Message] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any] | None


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> list[int]:
    """Return the ids of a conversation, as `apply_chat_template` of transformers.

    Special tokens in messages, tools, documents and variables are plain text: a user who writes one cannot end a turn
    or open another's (transformers' `sanitize_control_tokens`).

    Raises:
        TemplateError: there is no template, or it refuses the conversation.
    """
    return encode_marked(tokenizer, marked_chat(tokenizer, messages, **options))


def marked_chat(tokenizer: Tokenizer, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
    """Return the text of a conversation, in which spelled special tokens are marked: for `encode_marked`."""
    template = options.get("template") or tokenizer.chat_template
    if template is None:
        raise TemplateError(
            "this tokenizer has no chat template; its directory holds neither chat_template.jinja nor "
            "the field chat_template of tokenizer_config.json"
        )
    spelled = either(tokenizer.special_tokens)
    return template.render(
        [_marked(message, spelled) for message in messages],
        tools=_marked(options.get("tools"), spelled),
        documents=_marked(options.get("documents"), spelled),
        add_generation_prompt=options.get("add_generation_prompt", False),
        continue_final_message=options.get("continue_final_message", False),
        variables=_marked(options.get("variables"), spelled),
    )


def marked_text(tokenizer: Tokenizer, text: str) -> str:
    """Return a text of somebody's as `marked_chat` writes it."""
    return _marked(text, either(tokenizer.special_tokens))


def encode_marked(tokenizer: Tokenizer, text: str, behind: Sequence[int] = ()) -> list[int]:
    """Return the ids of a text of `marked_chat`, or of the part of it that stands behind these ids."""
    # [template's, spelled, template's, spelled, ...]; a mark whose partner the template has cut off only parts text.
    marks = f"{_OPEN}({either(tokenizer.special_tokens).pattern}){_CLOSE}|[{_OPEN}{_CLOSE}]"
    pieces = re.split(marks, text) if _OPEN in text or _CLOSE in text else [text]
    ids = list(behind)
    for number, piece in enumerate(pieces):
        if piece and ids:
            ids += encode_inside(tokenizer, piece, ids, special=number % 2 == 0)
        elif piece:
            ids += tokenizer.encode(piece, special=number % 2 == 0)
    return ids[len(behind) :]


def encode_answered(
    tokenizer: Tokenizer, messages: Sequence[Message], answer: str, **options: Unpack[ChatOptions]
) -> tuple[list[int], list[int]]:
    """Return the ids with which an answer is asked for, and those of the answer as a policy draws it, its end last.

    The answer is what the template writes behind its opening. Where the template writes the opening in another way once
    an answer follows, such as without the beginning of its reasoning, it is the answer's text and the end of a turn.

    Raises:
        TemplateError: see `encode_chat`.
    """
    asked = marked_chat(tokenizer, messages, **{**options, "add_generation_prompt": True})
    whole = marked_chat(tokenizer, [*messages, {"role": "assistant", "content": answer}], **options)
    prompt = encode_marked(tokenizer, asked)
    turn = encode_marked(tokenizer, whole[len(asked) :], prompt) if whole.startswith(asked) else []
    if kept := turn_length(tokenizer, turn):
        return prompt, turn[:kept]
    return prompt, [*encode_inside(tokenizer, answer, prompt), end_of_answer(tokenizer)]


def turn_length(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Return how many ids of an assistant's turn a policy draws: up to the first that ends it; 0: none does."""
    return next((at + 1 for at, token in enumerate(ids) if token in tokenizer.stop_ids), 0)


def end_of_turn(tokenizer: Tokenizer, template: Template | None = None) -> int | None:
    """Return the special token that a chat template (None: the tokenizer's own) writes behind an answer, if it does."""
    asked = ({"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER})
    try:
        written = marked_chat(tokenizer, asked, template=template)
    except TemplateError:
        return None
    _, answer, behind = written.rpartition(_ANSWER)
    found = either(tokenizer.special_tokens).search(behind) if answer else None
    return None if found is None else tokenizer.encode(found[0], special=True)[0]


def end_of_answer(tokenizer: Tokenizer) -> int:
    """Return the id that ends an answer: that of the chat template's turns, or `eos`."""
    found = end_of_turn(tokenizer) if tokenizer.chat_template is not None else None
    return tokenizer.eos if found is None else found


def _marked(value: Any, spelled: re.Pattern[str]) -> Any:
    """Return a copy of JSON values with marks around the special tokens in their strings."""
    if isinstance(value, str):
        return spelled.sub(rf"{_OPEN}\g<0>{_CLOSE}", value.replace(_OPEN, "").replace(_CLOSE, ""))
    if isinstance(value, Mapping):
        return {name: _marked(item, spelled) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item, spelled) for item in value]
    return value
