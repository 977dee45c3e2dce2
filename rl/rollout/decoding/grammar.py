"""Grammars: which words may follow, by llguidance, over the words of any tokenizer."""

import functools
import json
import threading
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from axlearn_like.tokenizers.protocol import Tokenizer
from mesh import UserError

Kind = Literal["json", "regex", "lark"]

# A policy that writes white space for ever would never end: between two words of JSON there is at most so much.
_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}"}


class GrammarError(UserError):
    """A grammar that cannot be read, or that has become too complex."""


class Matcher:
    """The place of one completion in a grammar."""

    def __init__(self, matcher: Any, size: int, eos: int):
        self._matcher, self._size, self._eos = matcher, size, eos

    def allowed(self) -> tuple[np.ndarray, bool]:
        """Return the words that may follow, bool [words], and True if the completion may end."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        found = np.unpackbits(packed, bitorder="little")[: self._size].astype(bool)
        may_end = bool(found[self._eos]) or not found.any()  # an error is known when it advances
        found[self._eos] = False
        return found, may_end

    def advance(self, tokens: list[int]) -> bool:
        """Go on behind words; returns True if nothing may follow (GrammarError: too complex, or not allowed)."""
        self._matcher.consume_tokens(tokens)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_short(self._matcher.get_error())}")
        return bool(self._matcher.is_stopped())


class Grammar:
    """A grammar that has been read."""

    def __init__(self, matcher: Any, size: int, eos: int):
        self._matcher, self._size, self._eos = matcher, size, eos

    def start(self) -> Matcher:
        """Return its beginning."""
        return Matcher(self._matcher.deep_copy(), self._size, self._eos)


class Grammars:
    """Reader of grammars over a tokenizer's words, which are made ready by the first use, or by `prepare`."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._lock = tokenizer, threading.Lock()

    def prepare(self) -> None:
        """Make the words ready on a thread of their own; without the library nothing happens."""

        def try_it() -> None:
            try:
                self._words()
            except GrammarError:
                pass

        threading.Thread(target=try_it, name="grammars", daemon=True).start()

    def read(self, kind: Kind, grammar: str | Mapping[str, Any]) -> Grammar:
        """Read a JSON schema, a regular expression, or a grammar in llguidance's form of Lark. Any thread may call it.

        Raises:
            GrammarError: it is none, it is too complex, or llguidance is not installed.
        """
        words = self._words()
        from llguidance import LLMatcher

        try:
            if kind == "json":
                written = grammar if isinstance(grammar, str) else json.dumps(grammar)
                source = LLMatcher.grammar_from_json_schema(written, defaults=_JSON)  # pyright: ignore[reportArgumentType]
            else:
                assert isinstance(grammar, str)
                source = (LLMatcher.grammar_from_regex if kind == "regex" else LLMatcher.grammar_from_lark)(grammar)
        except ValueError as error:
            raise GrammarError(_short(str(error))) from None
        matcher = LLMatcher(words, source, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some errors are found with the first words alone
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        return Grammar(matcher, self._tokenizer.vocab_size, self._tokenizer.eos)

    def _words(self) -> Any:
        with self._lock:
            return self._ready

    @functools.cached_property
    def _ready(self) -> Any:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise GrammarError("grammars need llguidance, which is not installed: pip install llguidance") from None
        return LLTokenizer(TokenizerWrapper(_Words(self._tokenizer)))


class _Words:
    """A tokenizer in the form that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer):
        words = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = [token for token, word in enumerate(words) if not word]
        self.tokens = [word or f"<special_{token}>".encode() for token, word in enumerate(words)]
        self.eos_token_id, self.bos_token_id = tokenizer.eos, tokenizer.bos
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        said = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return list(self._tokenizer.encode(said))


def _short(message: str) -> str:
    """Return the first line of the library's message, and the one that says what is wrong with an expression."""
    first, *others = message.strip().splitlines()
    found = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join([first, *found[-1:]])[:300]
