"""Training of small byte-level byte-pair encodings, written as a Hugging Face directory."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from axlearn_like.tokenizers.protocol import TokenizerError
from mesh.errors import UserError, install_hint

BOS, EOS, PAD = SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")
LEAST = 256 + len(SPECIAL)  # every byte is a token, so that every text has ids


def train_bpe(texts: Iterator[str], vocab_size: int, *, progress: bool = False) -> Any:
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
    seen = _Counted(texts)
    tokenizer.train_from_iterator(seen, trainer)
    if not seen.characters:
        raise TokenizerError("there is no text to train a tokenizer on")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def write_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers reads them.

    Raises:
        UserError: the directory has a tokenizer already, or cannot be written.
    """
    target = directory / "tokenizer.json"
    if target.exists():
        raise UserError(f"{target} exists already; name another directory, or remove it")
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "add_prefix_space": False, **names}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": 1_000_000}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        partial = target.with_suffix(".partial")
        partial.write_text(tokenizer.to_str(), encoding="utf-8")
        partial.rename(target)
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror or error}") from error


class _Counted:
    """Texts, and how many characters of them were read."""

    def __init__(self, texts: Iterator[str]):
        self._texts, self.characters = texts, 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters += len(text)
            yield text
