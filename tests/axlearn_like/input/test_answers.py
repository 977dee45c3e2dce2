"""Answers of every kind of example: behind the tokens that ask for them, with the tokens that they have inside a text.

Kinds of tokenizers and templates differ in what they put before a text, and in what ends a turn.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.input import Chat, InputError, Preference, PromptAnswer, StepLabels, UnpairedPreference
from axlearn_like.tokenizers.chat import encode_chat, marked_chat
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from tests.axlearn_like.tokenizers.kinds import KINDS, TEMPLATES, directory, library, tokenizer

_WORDS = ["the answer", "answer", " the", "42.", "\nthe\n", "é 1", "is  ", "</s", "Ω"]
TEXTS = st.lists(st.sampled_from(_WORDS), min_size=1, max_size=4).map("".join)
PAIRS = [(kind, template) for kind in KINDS for template in TEMPLATES]


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def whole(kind: str, before: str, text: str) -> list[int] | None:
    """Return the library's ids of a text, unless one of them spans the end of `before`."""
    found = library(kind).encode(text, add_special_tokens=False)
    border = len(before)
    return None if any(start < border < end for start, end in found.offsets) else found.ids


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "template"), PAIRS)
@settings(max_examples=12)
@given(question=TEXTS, answer=TEXTS)
def test_conversations(kind: str, template: str, question: str, answer: str) -> None:
    """SFT learns the answer and its end behind the tokens of the question, and DPO and KTO the same."""
    built, said = tokenizer(kind, template), talk(question, answer)
    asked = encode_chat(built, said[:1], add_generation_prompt=True)
    ids, learned = Chat.Config().build(tokenizer=built).encode({"messages": said}, "row")
    ids = list(ids)
    drawn = np.flatnonzero(learned)
    assert ids[: len(asked)] == asked and drawn.tolist() == list(range(len(asked), len(asked) + len(drawn)))
    ends = [token in built.stop_ids for token in ids[len(asked) : len(asked) + len(drawn)]]
    assert ends == [False] * (len(drawn) - 1) + [True]
    before = marked_chat(built, said[:1], add_generation_prompt=True)
    expected = whole(kind, before, marked_chat(built, said))
    assert expected is None or ids == expected
    for encoding in (Preference.Config(), UnpairedPreference.Config()):
        record: dict[str, Any] = {"prompt": said[:1], "chosen": said[1:], "rejected": said[1:]}
        found = encoding.build(tokenizer=built).encode({**record, "completion": said[1:], "label": True}, "row")
        if isinstance(found, tuple):
            assert found[0].prompt.tolist() == asked and [*asked, *found[0].tokens] == ids
        else:
            assert found["tokens"].tolist() == ids * 2 and (found["sides"][: len(ids)] > 0).tolist() == list(learned)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(prompt=TEXTS, answer=TEXTS, other=TEXTS)
def test_texts(kind: str, prompt: str, answer: str, other: str) -> None:
    """Prompts with answers, completions and steps that are texts, without a template."""
    built = tokenizer(kind)
    asked = [*([] if built.bos is None else [built.bos]), *built.encode(f"{prompt}\n")]
    ids, learned = PromptAnswer.Config().build(tokenizer=built).encode({"prompt": prompt, "answer": answer}, "row")
    expected = whole(kind, f"{prompt}\n", f"{prompt}\n{answer}")
    begin = asked[: built.bos is not None]
    assert list(ids)[: len(asked)] == asked and list(ids)[-1] == built.eos and list(learned)[-1]
    assert expected is None or list(ids) == [*begin, *expected, built.eos]
    record: dict[str, Any] = {"prompt": prompt, "chosen": answer, "rejected": other, "completion": answer}
    pair = Preference.Config().build(tokenizer=built).encode(record, "row")
    assert pair["tokens"][: len(ids)].tolist() == list(ids)
    alone, _ = UnpairedPreference.Config().build(tokenizer=built).encode({**record, "label": True}, "row")
    assert [*alone.prompt, *alone.tokens] == list(ids)
    steps = {"prompt": prompt, "completions": [answer, other], "labels": [1, 0]}
    tokens = StepLabels.Config().build(tokenizer=built).encode(steps, "row")["tokens"].tolist()
    pieces = [f"{prompt}\n", answer, "\n", other, "\n"]
    borders = ["".join(pieces[:n]) for n in range(1, 5)]
    known = [whole(kind, border, "".join(pieces)) for border in borders]
    assert any(ids is None for ids in known) or tokens == [*begin, *known[0], built.eos]  # type: ignore[misc]


def test_the_answer_of_issue_26273() -> None:
    """Zephyr's template with a tokenizer of SentencePiece's kind: no blank before the answer."""
    built = tokenizer("llama2", "zephyr")
    ids, _ = Chat.Config().build(tokenizer=built).encode({"messages": talk("is", "the answer")}, "row")
    names = {i: text for text, i in library("llama2").get_vocab().items()}
    texts = [names[i] for i in ids]
    at = len(texts) - 1 - texts[::-1].index("</s>")
    assert texts[at - 3 : at] == ["\n", "the", "▁answer"]


def test_later_turns() -> None:
    for kind, template in PAIRS:
        if template != "qwen3":  # which rewrites earlier turns, so they are refused
            said, built = talk("is", "the answer", " the", "42."), tokenizer(kind, template)
            ids, learned = Chat.Config().build(tokenizer=built).encode({"messages": said}, "row")
            assert list(ids) == encode_chat(built, said), (kind, template)
            second = encode_chat(built, said[:3], add_generation_prompt=True)
            assert list(ids)[: len(second)] == second and sum(map(bool, learned[: len(second)])) < sum(learned)


def test_what_a_record_spells_ends_no_turn() -> None:
    for kind, template in PAIRS:
        built = tokenizer(kind, template)
        ids, learned = Chat.Config().build(tokenizer=built).encode({"messages": talk("is", "a</s>b<|im_end|>c")}, "row")
        drawn = [i for i, kept in zip(ids, learned, strict=True) if kept]
        assert [token in built.stop_ids for token in drawn] == [False] * (len(drawn) - 1) + [True]
        known = kind != "unigram"  # whose pieces have no "<"
        assert not known or "a</s>b<|im_end|>c" in built.decode(drawn)


def test_a_template_without_an_end_is_refused(tmp_path: Path) -> None:
    """Here `<|other|>` is no token."""
    path = tmp_path / "endless.jinja"
    path.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|other|>\n{% endfor %}")
    built = HuggingFaceTokenizer.Config(path=directory("llama2"), chat_template=str(path)).build()
    assert built.stop_ids == (built.token_id("</s>"),)
    with pytest.raises(
        InputError, match=r"row: the chat template ends the assistant's turn with 'assistant: the<\|other\|>\\n', in"
    ):
        Chat.Config().build(tokenizer=built).encode({"messages": talk("is", "the")}, "row")


def test_the_end_is_the_first_that_a_policy_would_stop_at(tmp_path: Path) -> None:
    """A template may write the end of the text behind the end of the turn, where no policy gets."""
    path = tmp_path / "both.jinja"
    path.write_text(TEMPLATES["chatml"].partition("{% if add")[0] + "{% if not add_generation_prompt %}</s>{% endif %}")
    built = HuggingFaceTokenizer.Config(path=directory("gemma"), chat_template=str(path)).build()
    ids, learned = Chat.Config().build(tokenizer=built).encode({"messages": talk("is", "the")}, "row")
    assert list(ids)[-1] == built.eos and not learned[-1]
    assert [i for i, kept in zip(ids, learned, strict=True) if kept][-1] == built.token_id("<|im_end|>")
