"""Pages of a sequence as bytes, from one engine to another: a request goes on elsewhere without being prefilled again.

Layout: a magic, XXH3-128 of the rest, the bytes of the head, the head (JSON), the tokens (int32), and of each page its
length, checksum and bytes. The pages arrive in the tiers of the other engine, and come to its device with the request.
"""

import hashlib
import json
import struct
import weakref
from typing import Any

import jax
import numpy as np
import xxhash

from mesh import UserError
from rl.parameter_server.fingerprint import fingerprints
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.kv_cache.tiers.page_digests import chain
from rl.rollout.kv_cache.tiers.page_form import StoredPage, split_pages

_MAGIC = b"AXLPAGE1"
_HEAD = struct.Struct("<16sI")
_PAGE = struct.Struct("<QI")


def export_pages(engine: RolloutEngine, tokens: np.ndarray) -> bytes:
    """Return the cached pages of a sequence of the base policy, from the device and the tiers, and what they hang on.

    To be called between two steps. Pages of a request are there once it has ended, by `abort` too.

    Args:
        engine: with tiers.
        tokens: int32 [n], prompt and completion.

    Raises:
        UserError: the engine has no tiers, or no weights.
    """
    tiers, kv_cache = _tiers(engine), engine.scheduler.kv_cache
    key, size = (engine.version, None), kv_cache.page_size
    tokens = np.ascontiguousarray(tokens, np.int32)
    pages, records = kv_cache.hold(key, tokens)
    try:
        arrays = engine.executor.read_pages(pages)() if pages else []
    finally:
        kv_cache.pool.release(pages)
    stored = [tiers.form.pack(one) for one in split_pages(arrays, len(pages), records)]
    rest = tiers.known(list(chain(key, tokens, size))[len(pages) :])
    for page in tiers.stored(rest):
        if page is None:
            break
        stored.append(page)
    parts = [tokens[: len(stored) * size].tobytes()]
    for page in stored:
        parts += [_PAGE.pack(page.checksum, len(page.blob)), bytes(page.blob)]
    head = json.dumps({**_identity(engine), "count": len(stored)}).encode()
    body = head + b"".join(parts)
    return _MAGIC + _HEAD.pack(xxhash.xxh3_128_digest(body), len(head)) + body


def import_pages(engine: RolloutEngine, data: bytes) -> int:
    """Take the pages of `export_pages` into the tiers; returns the number of tokens that they hold.

    Raises:
        UserError: the data are damaged, or of another policy, version, form of pages or codec; nothing was taken.
    """
    tiers, size = _tiers(engine), engine.cfg.page_size
    start = len(_MAGIC) + _HEAD.size
    if len(data) < start or not data.startswith(_MAGIC):
        raise UserError(f"{len(data)} bytes are no pages of an engine; expected the result of export_pages")
    digest, length = _HEAD.unpack_from(data, len(_MAGIC))
    body = memoryview(data)[start:]
    if xxhash.xxh3_128_digest(body) != digest:
        raise UserError(f"pages are damaged: {len(data)} bytes arrived that do not match their checksum")
    theirs, ours = json.loads(bytes(body[:length])), _identity(engine)
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise UserError(f"pages of an engine whose {name} is {theirs.get(name)}; expected {value}")
    count = int(theirs["count"])
    at = length + 4 * count * size
    tokens = np.frombuffer(body[length:at], np.int32)
    pages = []
    for _ in range(count):
        checksum, nbytes = _PAGE.unpack_from(body, at)
        at += _PAGE.size + nbytes
        pages.append(StoredPage(bytes(body[at - nbytes : at]), checksum))
    tiers.add(zip(chain((engine.version, None), tokens, size), pages, strict=True))
    return len(tokens)


def _tiers(engine: RolloutEngine) -> HostTiers:
    tiers = engine.scheduler.kv_cache.tiers
    if tiers is None:
        raise UserError("RolloutEngine.tiers is None; expected HostTiers.Config, by which pages of a request can move")
    return tiers


def _identity(engine: RolloutEngine) -> dict[str, Any]:
    """Return what keys and values depend on beside the tokens, and the form of the pages."""
    return {
        "policy": _policy(engine),
        "version": engine.version,
        "page size": engine.cfg.page_size,
        "form of pages": _tiers(engine).form.described(),
    }


_POLICIES: weakref.WeakKeyDictionary[RolloutEngine, tuple[weakref.ref[Any], str]] = weakref.WeakKeyDictionary()


def _policy(engine: RolloutEngine) -> str:
    """Return a digest of the weights in place, computed once for each."""
    if (params := engine.runner.params) is None:
        raise UserError("the engine has no weights yet; call set_weights first")
    first = jax.tree.leaves(params)[0]
    known = _POLICIES.get(engine)
    if known is not None and known[0]() is first:
        return known[1]
    digest = hashlib.sha256(repr(sorted(fingerprints(params).items())).encode()).hexdigest()[:32]
    _POLICIES[engine] = weakref.ref(first), digest
    return digest
