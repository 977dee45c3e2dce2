"""The protocol of a tokenizer: all that input, rollouts and serving use of one, whichever library it comes from."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from mesh.errors import UserError


class TokenizerError(UserError, ValueError):
    """A tokenizer that cannot be built, or ids that it does not have."""


class Template(Protocol):
    """A chat template: a conversation as the text that a tokenizer encodes. See `axlearn_like.tokenizers.chat`."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. Built by `config.build()`; immutable, and safe to share between threads."""

    @property
    def vocab_size(self) -> int:
        """The size: every id is below it; the embedding has at least as many rows."""
        ...

    @property
    def bos(self) -> int | None:
        """The id that begins a text or a prompt; None: texts begin without one."""
        ...

    @property
    def eos(self) -> int:
        """The id that ends a text or an answer."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a completion: `eos` first, then others with which a model ends its turns."""
        ...

    @property
    def pad(self) -> int | None:
        """The id that stands for no token; None where none has no other meaning. Masks come from positions alone."""
        ...

    @property
    def digest(self) -> str:
        """A checksum of everything that ids depend on: settings, and the content of files.

        Tokenised data and runs are only continued with a tokenizer of the same digest.
        """
        ...

    @property
    def special_tokens(self) -> Collection[str]:
        """Special tokens as a text may spell them; `encode` reads them in a template's text only."""
        ...

    @property
    def chat_template(self) -> Template | None:
        """The form of a conversation with the policy; None: a prompt is plain text."""
        ...

    def encode(self, text: str, *, special: bool = False) -> Sequence[int]:
        """Return the ids of a text; none are added to them.

        Special tokens spelled out in the text are plain text, as what users write must not control the model, unless
        `special` says that the text is a template's.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text whose ids these are, without special ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            TokenizerError: an id is outside 0..vocab_size-1.
        """
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text.

        None for special ids, and for those that no token has: an embedding may have more rows, which a policy that is
        not trained draws too.
        """
        ...


def completion_text(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Return the text that ids add to the text before them; bytes that are not UTF-8 become U+FFFD.

    `decode` may drop a blank at the start, which some tokenizers put before a text; a completion keeps it. A longer
    completion only lengthens the text, but for U+FFFD at its end, which is a character that is not complete.
    """
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="replace")


def answer_text(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Return the text of an answer as a verifier reads it: special tokens at its ends are dropped, as its end itself.

    Between two texts a special token that a policy has drawn is spelled out, or U+FFFD where it has no spelling:
    without it "1<pad>2" would read "12".
    """
    tokens = list(ids)
    pieces = [tokenizer.token_bytes(token) for token in tokens]
    texts = [n for n, piece in enumerate(pieces) if piece]
    inside = slice(texts[0], texts[-1] + 1) if texts else slice(0)
    tokens, pieces = tokens[inside], pieces[inside]
    if not all(pieces):
        spelled = {tokenizer.encode(text, special=True)[0]: text.encode() for text in tokenizer.special_tokens}
        unknown = "\ufffd".encode()
        pieces = [piece or spelled.get(token, unknown) for token, piece in zip(tokens, pieces, strict=True)]
    return b"".join(pieces).decode("utf-8", errors="replace")


def begin(tokenizer: Tokenizer) -> list[int]:
    """Return the ids before a text: `bos`, or nothing."""
    return [] if tokenizer.bos is None else [tokenizer.bos]


def checked_ids(ids: Iterable[int], vocab_size: int) -> Iterator[int]:
    """Yield ids, refusing those that a tokenizer of this size cannot have (TokenizerError)."""
    for i in ids:
        if not 0 <= i < vocab_size:
            raise TokenizerError(f"token id {i} is outside this tokenizer's 0..{vocab_size - 1}")
        yield i
