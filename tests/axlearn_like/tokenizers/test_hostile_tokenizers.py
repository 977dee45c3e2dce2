"""Hostile tokenizers are refused with a sentence within a second and 200 MB, by an import as by what uses them."""

import json
from pathlib import Path

import pytest

from axlearn_like.tokenizers.embedding import tokenizer_fault
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from tests.axlearn_like.tokenizers import hostile_tokenizers as hostile
from tests.measured import check, measured


@pytest.mark.slow
def test_every_hostile_tokenizer_is_refused() -> None:
    found = measured(hostile.__name__)
    assert len(found) == len(hostile.CASES) > 30
    check(found)


def test_an_import_refuses_what_cannot_be_used(tmp_path: Path) -> None:
    """All of these have files that read well, and ids that the embedding has."""
    for name, fields, message in (
        (
            "decoder",
            {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
            "whose text depends on more than the token's own bytes",
        ),
        ("end", {"settings": {"eos_token": "<none>"}}, "has no token '<none>', which is said to end a text"),
        ("expression", {"pre_tokenizer": hostile.split("(")}, "is no tokenizer that the library"),
        ("template", {"settings": {"chat_template": "{% if %}"}}, "line 1 of the template"),
    ):
        (tmp_path / name).mkdir()
        fault = tokenizer_fault(hostile.write(tmp_path / name, **fields), 3)
        assert fault is not None and message in fault, fault
    (tmp_path / "good").mkdir()
    assert tokenizer_fault(hostile.write(tmp_path / "good"), 3) is None
    assert "3 ids, but the embedding 2 rows" in str(tokenizer_fault(tmp_path / "good", 2))


def test_templates_by_name_and_growth_within_bounds_are_read(tmp_path: Path) -> None:
    listed = [{"name": ["x"], "template": "no"}, 3, {"name": "default", "template": "{{ messages[0].content }}"}]
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "b"}, {"type": "NFKC"}]}
    built = HuggingFaceTokenizer.Config(
        path=str(hostile.write(tmp_path, settings={"chat_template": listed}, normalizer=normalizer))
    ).build()
    assert built.chat_template is not None and built.chat_template.render([{"content": "a"}]) == "a"
    assert json.loads((tmp_path / "tokenizer.json").read_text())["normalizer"] == normalizer
