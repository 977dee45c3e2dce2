"""Training of small byte-level byte-pair encodings, written as a Hugging Face directory."""

import json
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from axlearn_like.tokenizers.protocol import TokenizerError
from mesh.errors import UserError, install_hint

BOS, EOS, PAD = SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")
FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
_RECIPE = "trained_from"  # field of CONFIG
LONGEST = 500  # characters of a word
LEAST = 256 + len(SPECIAL)  # every byte is a token, so that every text has ids


_WORD = re.compile(rf"\S{{{LONGEST}}}|\s{{{LONGEST}}}")


class Texts:
    """Texts to train on, with what is known of those that were read: characters, and a digest.

    Words of more than `LONGEST` characters are divided, since the time of a merge grows with a word's length squared.
    """

    def __init__(self, texts: Iterable[str]):
        self._texts, self.characters, self._digest = texts, 0, xxhash.xxh3_128()

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters += len(text)
            self._digest.update(f"{len(text)} ".encode() + text.encode())
            begin = 0
            for found in _WORD.finditer(text):
                yield text[begin : found.end()]
                begin = found.end()
            yield text[begin:]

    def recipe(self, vocab_size: int) -> str:
        """Return what the tokenizer follows from: a digest of the texts that were read, and the most ids."""
        return f"{self._digest.hexdigest()} {vocab_size}"


def train_bpe(texts: Texts, vocab_size: int, *, progress: bool = False) -> Any:
    """Return a tokenizer (of the library `tokenizers`) with at most `vocab_size` ids, the special ones first.

    Each digit is a token of its own, as models compute better with digits that are. The same texts in the same order
    give the same tokenizer.

    Raises:
        UserError: fewer ids than bytes and special tokens; TokenizerError: no text at all.
    """
    if vocab_size < LEAST:
        raise UserError(f"a vocabulary of {vocab_size}: expected {LEAST} or more, 256 bytes and {len(SPECIAL)} special")
    if find_spec("tokenizers") is None:
        raise UserError(f"training a tokenizer needs the package tokenizers; {install_hint('hf')}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    if not texts.characters:
        raise TokenizerError("there is no text to train a tokenizer on")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def trained_before(texts: Texts, vocab_size: int, directory: Path) -> bool:
    """Return True if the directory has the tokenizer of these texts, which are read; False if it has none.

    Raises:
        UserError: it has another one.
    """
    if not (directory / FILE).exists():
        return False
    for _ in texts:
        pass
    try:
        recipe = json.loads((directory / CONFIG).read_text(encoding="utf-8")).get(_RECIPE)
    except (OSError, ValueError, AttributeError):
        recipe = None
    if recipe == texts.recipe(vocab_size):
        return True
    raise UserError(f"{directory} has a tokenizer.json already, of other texts or of another size; name another --out")


def write_tokenizer(tokenizer: Any, directory: Path, recipe: str) -> None:
    """Write tokenizer.json, and tokenizer_config.json with what it was trained from, as transformers reads them.

    Raises:
        UserError: the directory has a tokenizer already, or cannot be written.
    """
    target = directory / FILE
    if target.exists():
        raise UserError(f"{target} exists already; name another directory")
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "add_prefix_space": False, **names}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": 1_000_000, _RECIPE: recipe}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        partial = target.with_suffix(".partial")
        partial.write_text(tokenizer.to_str(), encoding="utf-8")
        partial.rename(target)
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror or error}") from error
