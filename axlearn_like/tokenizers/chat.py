"""Conversations as token ids: a chat template's special tokens are tokens, those that a user spells are text."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from axlearn_like.tokenizers.jinja_template import Message, TemplateError
from axlearn_like.tokenizers.protocol import Template, Tokenizer

# Around a special token that somebody has spelled, while the template puts it where it belongs. From the private use
# area: no text means anything by them, and those in the messages are dropped.
_OPEN, _CLOSE = "\ue000", "\ue001"


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
    spelled = _either(tokenizer.special_tokens)
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
    return _marked(text, _either(tokenizer.special_tokens))


def encode_marked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text of `marked_chat`, or of a part of it."""
    if _OPEN not in text and _CLOSE not in text:
        return list(tokenizer.encode(text, special=True))
    # [template's, spelled, template's, spelled, ...]; a mark whose partner the template has cut off only parts text.
    pieces = re.split(f"{_OPEN}({_either(tokenizer.special_tokens).pattern}){_CLOSE}|[{_OPEN}{_CLOSE}]", text)
    ids = list(tokenizer.encode(pieces[0], special=True))
    for number, piece in enumerate(pieces[1:], start=1):
        if piece:
            ids += _inside(tokenizer, piece, special=number % 2 == 0)
    return ids


def _inside(tokenizer: Tokenizer, piece: str, *, special: bool) -> Sequence[int]:
    """Encode a piece from the middle of a text: some tokenizers put a blank before a text's first word."""
    newline = list(tokenizer.encode("\n"))
    ids = list(tokenizer.encode(f"\n{piece}", special=special))
    return ids[len(newline) :] if ids[: len(newline)] == newline else tokenizer.encode(piece, special=special)


def _marked(value: Any, spelled: re.Pattern[str]) -> Any:
    """Return a copy of JSON values with marks around the special tokens in their strings."""
    if isinstance(value, str):
        return spelled.sub(rf"{_OPEN}\g<0>{_CLOSE}", value.replace(_OPEN, "").replace(_CLOSE, ""))
    if isinstance(value, Mapping):
        return {name: _marked(item, spelled) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item, spelled) for item in value]
    return value


def _either(texts: Iterable[str]) -> re.Pattern[str]:
    """Return the expression for any of these texts, the longest first; with none, nothing matches."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
