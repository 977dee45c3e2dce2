"""The split by text: a question is held out if and only if a stable hash of it says so."""

import hashlib


def question_digest(question: str) -> int:
    """Return 64 bits that depend on a question's text alone, the same in every process."""
    return int.from_bytes(hashlib.blake2b(question.encode("utf-8"), digest_size=8).digest(), "big")


def is_heldout(question: str, heldout_every: int) -> bool:
    """Return True if a question is held out."""
    return question_digest(question) % heldout_every == 0
