"""Directories and buckets by URL, through TensorStore's KvStore."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.errors import UserError, did_you_mean

_SCHEMES = ("file", "gs", "s3", "memory")


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib makes one slash of two


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """Return a path with its `~` expanded.

    Args:
        path: path, absolute or relative.
        what: the setting or argument, for messages.

    Raises:
        UserError: it is a URL.
    """
    text = os.fspath(path)
    if _URL.match(text):
        raise UserError(
            f"{what}={text!r}: expected a local path, not a URL; mount the bucket (gcsfuse) or copy it. gs:// works in "
            "stores of checkpoints (offload, remote) and in axl launch --storage"
        )
    return Path(text).expanduser()


def open_store(url: str | Mapping[str, Any], setting: str, *, timeout: float = 120.0, retries: int = 6) -> Any:
    """Open a `tensorstore.KvStore`; nothing is read or written yet.

    Args:
        url: as for `store_spec`.
        setting: config path of the URL, for messages.
        timeout: seconds to wait for an answer.
        retries: repetitions of a request that a bucket did not answer, with growing pauses.

    Raises:
        UserError: the URL is not one of these, or it cannot be opened.
    """
    import tensorstore as ts

    spec = store_spec(url, setting)
    resources: dict[str, Any] = dict.fromkeys(("gcs_request_retries", "s3_request_retries"), {"max_retries": retries})
    # Without locks files are written under names of their own and renamed. With them, a `x.__lock` that a killed
    # process left is not truncated: the next write to x, if it is shorter, ends with the rest of it (0.1.86).
    context = ts.Context(resources | {"file_io_locking": {"mode": "none"}})
    if not isinstance(spec, str) and spec.get("driver") == "memory":
        context = _memory(ts)
    try:
        return ts.KvStore.open(spec, context=context).result(timeout=timeout)
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(f"{setting}={store_text(url)!r} cannot be opened: {error or 'no answer'}") from error


def store_spec(url: str | Mapping[str, Any], setting: str) -> str | dict[str, Any]:
    """Return the argument of KvStore.open; its path ends with a slash.

    Args:
        url: file:///path, file://relative/path or just a path; gs://bucket/path, s3://bucket/path, memory://name; or
            the specification of a KvStore as a dict, for what no URL can say (the endpoint of an S3 store).
        setting: config path of the URL, for messages.

    Raises:
        UserError: it is none of these.
    """
    if not isinstance(url, str):
        return {**url, "path": str(url.get("path", "")).rstrip("/") + "/"}
    known = ", ".join(f"{scheme}://" for scheme in _SCHEMES) + " or a path"
    scheme, separator, rest = url.partition("://")
    if separator and scheme not in _SCHEMES:
        nearest = did_you_mean(scheme, _SCHEMES)
        raise UserError(f"{setting}={url!r}: unknown scheme {scheme!r}{nearest} (expected {known})")
    path = rest if separator else url
    if scheme != "memory" and (not path.strip("/") or (not separator and re.match(r"\w+:", url))):
        raise UserError(f"{setting}={url!r}: expected {known}")
    if scheme == "file" or not separator:
        return {"driver": "file", "path": f"{Path(path).expanduser().absolute()}/"}
    if scheme == "memory":
        return {"driver": "memory", "path": path.rstrip("/") + "/"}
    return url.rstrip("/") + "/"


def store_text(url: str | Mapping[str, Any]) -> str:
    """Return the URL or specification as one line of text."""
    return url if isinstance(url, str) else json.dumps(dict(url))


_contexts: list[Any] = []


def _memory(ts: Any) -> Any:
    """Return one context for all, so that stores of this process share memory://."""
    if not _contexts:
        _contexts.append(ts.Context())
    return _contexts[0]
