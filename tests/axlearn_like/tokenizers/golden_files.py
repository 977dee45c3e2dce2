"""Tokenizers and conversations of tests/golden/chat_templates.py."""

import functools
import gzip
import json
from pathlib import Path
from typing import Any

from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from axlearn_like.tokenizers.jinja_template import JinjaTemplate

FOLDER = Path(__file__).parent / "golden"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CONVERSATIONS: dict[str, dict[str, Any]] = json.loads((FOLDER / "conversations.json").read_text())
TEMPLATES = {path.stem: path.read_text() for path in sorted((FOLDER / "templates").glob("*.jinja"))}


@functools.cache
def rendered() -> dict[str, Any]:
    """Text and ids by "tokenizer | template | conversation", as transformers makes them."""
    return json.loads(gzip.decompress((FOLDER / "rendered.json.gz").read_bytes()))


@functools.cache
def tokenizer(name: str, template: str = "") -> HuggingFaceTokenizer:
    """Return `byte_level` or `byte_fallback`, with a template of that name."""
    path = str(FOLDER / "templates" / f"{template}.jinja") if template else ""
    return HuggingFaceTokenizer.Config(path=str(FOLDER / name), chat_template=path).build()


def jinja(name: str) -> JinjaTemplate:
    """Return a template."""
    return JinjaTemplate(TEMPLATES[name], NAMES)
