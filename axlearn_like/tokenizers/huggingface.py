"""Tokenizers of Hugging Face directories, by the library `tokenizers`: no network, and no transformers."""

import functools
import json
from collections.abc import Collection, Iterable
from importlib.util import find_spec
from typing import Any, override

import xxhash

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, strip_comments, to_text
from axlearn_like.tokenizers.byte_decoder import ByteDecoder
from axlearn_like.tokenizers.chat import end_of_turn
from axlearn_like.tokenizers.files import TokenizerFiles, read_files
from axlearn_like.tokenizers.inside import either, encode_inside
from axlearn_like.tokenizers.jinja_template import JinjaTemplate
from axlearn_like.tokenizers.protocol import TokenizerError, checked_ids
from axlearn_like.tokenizers.template_process import template_process
from mesh.errors import UserError, install_hint

_MOST_GROWTH = 1000  # times, of a text by its normalizer
_END = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")  # end tokens for files that name none


class HuggingFaceTokenizer(Configurable):
    """A tokenizer.json, or GPT-2's pair of vocabulary and merges; the files beside it name the special tokens."""

    class Config(ConfigBase["HuggingFaceTokenizer"]):
        path: str = REQUIRED  # a directory, its tokenizer.json, or the vocabulary of a pair
        vocab_size: int | None = None  # ids, unused ones included; None: those of the files
        bos_token: str | None = None  # token put before each text; None: as the files say; "": none
        eos_token: str | None = None  # token that ends a text; None: as the files name it
        chat_template: str | None = None  # a Jinja file; None: the directory's own, if it has one; "": none

        @override
        def check_fields(self) -> None:
            self.require_least(1, "vocab_size")
            self.require("eos_token", self.eos_token != "", "a token, or None for the one that the files name")

    def __init__(self, cfg: Config):
        files = read_files(cfg.path)
        source = files.template if cfg.chat_template is None else cfg.chat_template
        if source:
            template_process().start()  # started while the vocabulary is read
        loaded = _load(files)
        self._loaded, size = loaded, max(loaded.ids.values(), default=-1) + 1
        if cfg.vocab_size is not None and cfg.vocab_size < size:
            raise TokenizerError(f"vocab_size={cfg.vocab_size}, but {files.where} has ids up to {size - 1}")
        self.vocab_size = cfg.vocab_size or size
        self.bos = self._bos(files, cfg.bos_token)
        self.special_tokens: Collection[str] = loaded.special
        self.chat_template: JinjaTemplate | None = None
        if cfg.chat_template:
            self.chat_template = JinjaTemplate.read(cfg.chat_template, files.named)
        elif source:
            self.chat_template = JinjaTemplate(source, files.named, where=str(files.where.parent))
        self.stop_ids = self._stop_ids(files, cfg.eos_token)
        self.eos = self.stop_ids[0]
        pad = loaded.ids.get(files.token("pad_token") or "")
        # A pad that ends texts too would be a second meaning of that id: rows are filled by position, not by an id.
        self.pad: int | None = None if pad in (*self.stop_ids, self.bos) else pad
        settings = strip_comments(to_text(cfg.clone(path="", chat_template=None)))
        template = "" if self.chat_template is None else self.chat_template.source
        self.digest = xxhash.xxh3_128_hexdigest(f"{files.digest}\n{settings}\n{template}\n{self.stop_ids}".encode())

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text; `special`: special tokens spelled out in it are themselves."""
        ids = self._loaded.encode(text, special)
        if special or self._loaded.controls.isdisjoint(ids):
            return ids
        # A unigram model has its special tokens among its pieces, where a text finds them: it is cut within each.
        cuts = [found.start() + 1 for found in either(self.special_tokens).finditer(text)]
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
        ids = self._loaded.encode(pieces[0])
        for piece in pieces[1:]:
            ids += encode_inside(self, piece, ids)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text whose ids these are, without special ids."""
        joined = b"".join(map(self.token_bytes, checked_ids(ids, self.vocab_size)))
        if self._loaded.drops_blank:
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; none for special and unused ids."""
        return self._loaded.bytes.get(token, b"")

    def token_id(self, text: str) -> int | None:
        """Return the id of a token as the vocabulary writes it, if there is one."""
        return self._loaded.ids.get(text)

    def _stop_ids(self, files: TokenizerFiles, override: str | None) -> tuple[int, ...]:
        """Return the ids that end a completion: that of a text, those that files list, that of the template's turns.

        A model that learns conversations learns the last one, though it may be in no file. Engines, servers and exports
        take these.
        """
        ids, named = self._loaded.ids, override or files.token("eos_token")
        listed = [] if files.ends is None else files.ends if isinstance(files.ends, list) else [files.ends]
        if named is None and not listed:
            named = next((text for text in _END if text in self._loaded.special), None)
        if named is not None and named not in ids:
            raise TokenizerError(f"{files.where} has no token {named!r}, which is said to end a text (eos_token)")
        turn = None if self.chat_template is None else end_of_turn(self)
        found = [*([ids[named]] if named is not None else []), *listed, *([] if turn is None else [turn])]
        if not found:
            raise TokenizerError(
                f"{files.where}: no file beside it names the token that ends a text; set eos_token, for example "
                'eos_token="<|endoftext|>"'
            )
        wrong = [i for i in found if type(i) is not int or not 0 <= i < self.vocab_size]
        if wrong:
            raise TokenizerError(
                f"{files.ends_in}: eos_token_id {wrong[0]!r:.60}, but ids end at {self.vocab_size - 1}"
            )
        return tuple(dict.fromkeys(found))

    def _bos(self, files: TokenizerFiles, override: str | None) -> int | None:
        """Return the id that encoding for the model puts first."""
        named, wanted = files.token("bos_token"), files.settings["tokenizer_config.json"].get("add_bos_token")
        if override is not None:
            named, wanted = override, bool(override)
        if wanted is None:
            first = self._loaded.encode("", whole=True)[:1]
            return first[0] if first and first[0] == self._loaded.ids.get(named or "", first[0]) else None
        if not wanted:
            return None
        if not named or named not in self._loaded.ids:
            raise TokenizerError(f"{files.where} has no token {named!r}, which is said to begin a text (bos_token)")
        return self._loaded.ids[named]


class _Loaded:
    """The library's tokenizer, and the tables made of it; shared by all objects of the same files."""

    def __init__(self, files: TokenizerFiles):
        self._files = files
        self.plain = _build(files)
        added = self.plain.get_added_tokens_decoder()
        self.ids: dict[str, int] = self.plain.get_vocab(with_added_tokens=True)
        self.special = frozenset(token.content for token in added.values() if token.special)
        decoder = ByteDecoder(files.spec.get("decoder"), str(files.where))
        self.drops_blank = decoder.drops_blank
        texts = {i: text.encode() if i in added else decoder.token(text) for text, i in self.ids.items()}
        self.bytes = {i: text for i, text in texts.items() if i not in {self.ids[name] for name in self.special}}
        self.plain.encode_special_tokens = True
        # Special ids that the model itself makes of a text, but for that of unknown characters.
        found = {text: self.encode(text) for text in self.special}
        self.controls = frozenset(self.ids[text] for text, ids in found.items() if self.ids[text] in ids)
        self.controls -= frozenset(self.encode("\U0010fffd"))

    def encode(self, text: str, special: bool = False, whole: bool = False) -> list[int]:
        """Return the ids of a text, as `HuggingFaceTokenizer.encode`; `whole`: with those that the files put around it.

        Raises:
            TokenizerError: the library fails on it, for example since an expression of the files takes too long.
        """
        try:
            return (self.parsing if special else self.plain).encode(text, add_special_tokens=whole).ids
        except BaseException as error:
            if not _of_library(error):
                raise
            why = "a regular expression of it takes too long" if "Regex" in str(error) else "it fails"
            said = f"{why} with a text of {len(text):,} characters ({error!s:.100})"
            raise TokenizerError(f"{self._files.where}: {said}") from None

    @functools.cached_property
    def parsing(self) -> Any:
        """The tokenizer to which special tokens spelled out in a text are themselves."""
        return _build(self._files)


_load = functools.lru_cache(maxsize=4)(_Loaded)


def _of_library(error: BaseException) -> bool:
    """Return True for an error of the library: an Exception and nothing narrower, or a panic, which has no class."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _listed(files: TokenizerFiles) -> list[tuple[int, dict[str, Any]]]:
    """Return the ids and tokens that tokenizer_config.json adds, in order (TokenizerError)."""
    listed: Any = files.settings["tokenizer_config.json"].get("added_tokens_decoder") or {}
    try:
        found = sorted(((int(i), token) for i, token in listed.items()), key=lambda one: one[0])
        if all(isinstance(token["content"], str) for _, token in found):
            return found
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    where = f"{files.where.parent}/tokenizer_config.json"
    raise TokenizerError(f"{where}: added_tokens_decoder: expected an object of id -> token with its content")


def _check_growth(files: TokenizerFiles) -> None:
    """Refuse a normalizer that can make a text a thousand times as long (TokenizerError)."""
    growth, left = 1, [files.spec.get("normalizer")]
    while left:
        step: Any = left.pop()
        if isinstance(step, dict):
            left += step["normalizers"] if isinstance(step.get("normalizers"), list) else []
            written = step.get("content") or step.get("prepend")
            growth *= max(1, len(written)) if isinstance(written, str) else 1
        if growth > _MOST_GROWTH:
            raise TokenizerError(f"{files.where}: its normalizer makes a text up to {growth:,} times as long")


def _build(files: TokenizerFiles) -> Any:
    if find_spec("tokenizers") is None:
        raise UserError(f"{files.where} needs the package tokenizers; {install_hint('hf')}")
    from tokenizers import AddedToken, Tokenizer

    _check_growth(files)
    try:
        built = Tokenizer.from_str(json.dumps(files.spec))
    except BaseException as error:
        if not _of_library(error):
            raise
        said = f"{files.where} is no tokenizer that the library `tokenizers` reads: {error!s:.300}"
        raise TokenizerError(said) from error
    built.no_truncation()
    built.no_padding()
    known = built.get_vocab(with_added_tokens=True)
    for i, token in _listed(files):
        if token["content"] not in known:
            flags = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            built.add_tokens([AddedToken(token["content"], special=bool(token.get("special")), **flags)])
        if built.token_to_id(token["content"]) != i:
            raise TokenizerError(
                f"{files.where.parent}/tokenizer_config.json gives {token['content']!r} the id {i}, but in "
                f"{files.where.name} it is {built.token_to_id(token['content'])}"
            )
    # A token that is named but not added would be text to the library.
    known = built.get_vocab(with_added_tokens=True)
    built.add_special_tokens([text for text in files.named.values() if text in known])
    return built
