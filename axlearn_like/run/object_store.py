"""Directories and buckets by URL, through TensorStore's KvStore."""

import contextlib
import fcntl
import fnmatch
import functools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mesh.errors import UserError, did_you_mean
from mesh.files.bucket import Bucket, BucketError, bucket_url
from mesh.files.cache_directory import cache_directory
from mesh.files.written import open_written, replace_file

_SCHEMES = ("file", "gs", "s3", "memory")
_STEP = re.compile(r"((?:.*/)?checkpoints/(?:[^/]+/)*?\d+)/.+", re.DOTALL)
KEPT = ("best", "pending")  # folders of checkpoints of which all are taken, not the newest alone
COMPLETE, OWNERS = "COMPLETE", "owner/"  # last object of a step in a bucket; folder of who owns the run (mirror.py)


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """Return a path with its `~` expanded.

    Args:
        path: path, absolute or relative, or file://.

    Raises:
        UserError: it is a URL of something else.
    """
    text = os.fspath(path)
    if bucket_url(text):
        raise UserError(
            f"{what}={text!r}: expected a local path, not a URL; write it here, and copy it (gcloud storage cp). Run "
            "directories, data and models may be gs://"
        )
    return Path(re.sub("^file:/+", "/", text)).expanduser()


def fetched(
    path: str | os.PathLike[str],
    what: str,
    *,
    version: str | None = "all",
    only: Callable[[str], bool] = lambda name: True,
    quiet: bool = False,
) -> Path:
    """Return a path of this machine: the one given, or that of a copy of a URL's content, fetched where it changed.

    Args:
        path: path, or URL of a file or folder.
        version: checkpoints of a run that are fetched: the newest (None), "best", a step, "none"; "all": every file.
        only: says of a name within a folder if it is needed.

    Raises:
        UserError: nothing is there, or it cannot be reached; the disk has no room.
    """
    if (url := bucket_url(path)) is None:
        return local_path(path, what)
    bucket, (scheme, _, root) = Bucket(url, what), url.partition("://")
    files = bucket.files()
    if not files:
        raise BucketError(f"{what}: {url} holds nothing; expected a file, or a folder with files")
    cache = cache_directory("buckets") / scheme
    record = cache / f".{root.partition('/')[0]}.json"
    cache.mkdir(exist_ok=True)
    with open_written(f"{record}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        here: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
        target = cache / root
        paths = {name: target if name == "." else target / name for name in select_files(files, version, root)}
        paths = {name: path for name, path in paths.items() if only(name)}
        due = {n: p for n, p in paths.items() if here.get(str(p)) != files[n][1] or not p.exists()}
        sizes = {name: files[name][0] for name in due}
        for gone in [each for each in here if each.startswith(f"{target}/") and each[len(f"{target}/") :] not in files]:
            Path(gone).unlink(missing_ok=True)
            del here[gone]
        if due:
            say_fetching(url, target, sum(sizes.values()), len(due), quiet=quiet)
            bucket.get(due, sizes)
            here |= {str(path): files[name][1] for name, path in due.items()}
        replace_file(record, json.dumps(here))
    return target


def fetched_pattern(pattern: str, what: str) -> str:
    """Return a path or glob of this machine; what the URL of one matches is fetched (UserError: see `fetched`)."""
    if (url := bucket_url(pattern)) is None:
        return pattern
    parts = url.split("/")
    fixed = next((number for number, part in enumerate(parts) if re.search(r"[*?[]", part)), len(parts))
    rest = "/".join(parts[fixed:])
    folder = fetched("/".join(parts[:fixed]), what, only=lambda name: not rest or fnmatch.fnmatch(name, rest))
    return str(folder / rest) if rest else str(folder)


def check_new(url: str, what: str) -> Bucket:
    """Return the bucket of a URL (UserError: it holds files already, or cannot be reached)."""
    bucket = Bucket(url, what)
    if bucket.files():
        raise UserError(f"{what}: {url} holds files already; expected a folder that is not there yet")
    return bucket


@contextlib.contextmanager
def outgoing(path: Path, what: str) -> Iterator[Path]:
    """Yield the path; of a URL a new folder of this machine, whose files are copied there when the block ends well.

    Raises:
        UserError: something is there already, or it cannot be written.
    """
    if (url := bucket_url(path)) is None:
        yield path
        return
    bucket = check_new(url, what)
    with tempfile.TemporaryDirectory(dir=cache_directory("outgoing")) as made:
        folder = Path(made) / path.name
        yield folder
        files = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
        print(f"copying {len(files)} files from {folder} to {url}", file=sys.stderr, flush=True)
        bucket.put(files)


def say_fetching(url: str, target: Path, nbytes: int, count: int, *, quiet: bool = False) -> None:
    """Say what is copied to this machine (UserError: there is no room for it)."""
    free = shutil.disk_usage(next(folder for folder in (target, *target.parents) if folder.exists())).free
    size = f"{nbytes / 1e6:,.1f} MB in {count} file{'s' * (count > 1)}"
    if nbytes > free:
        raise BucketError(f"{url}: {size} do not fit on the disk of {target}, where {free / 1e6:,.1f} MB are free")
    if not quiet:
        print(f"fetching {size} from {url} to {target}", file=sys.stderr, flush=True)


def step_of(name: str) -> str | None:
    """Return the path of the checkpoint that a file is part of; None: it is none."""
    found = _STEP.fullmatch(name)
    return found[1] if found else None


def select_files(files: Iterable[str], version: str | None = None, root: str = "") -> list[str]:
    """Return the files to fetch: of a run directory in a bucket those beside checkpoints, and of these complete ones.

    Args:
        files: names relative to `root`.
        version: as for `fetched`.
        root: the folder of the names, which may be within a run.
    """
    files = set(files)
    if version == "all":
        return sorted(files)
    places = {name: step_of(f"{root}/{name}") for name in files}
    marked = {step for name, step in places.items() if step and name.endswith(f"/{COMPLETE}")}
    if not marked and not any(name.startswith(OWNERS) for name in files):
        marked = {step for step in places.values() if step}  # copied there by other means
    steps = {step: (os.path.dirname(step), int(os.path.basename(step))) for step in marked}
    newest = {folder: max(n for other, n in steps.values() if other == folder) for folder, _ in steps.values()}

    def wanted(step: str, folder: str, number: int) -> bool:
        if version is None or not step.startswith(f"{root}/"):  # the folder is within a step
            return os.path.basename(folder) in KEPT or number == newest[folder]
        return version in (os.path.basename(folder), str(number))

    taken = {step for step, place in steps.items() if wanted(step, *place)}
    own = {name for name in files if name.startswith(OWNERS) or name.rpartition("/")[2] == COMPLETE}
    return sorted(name for name in files - own if (step := places[name]) is None or step in taken)


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
        context = _memory()
    try:
        return ts.KvStore.open(spec, context=context).result(timeout=timeout)
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(f"{setting}={store_text(url)!r} cannot be opened: {error or 'no answer'}") from error


def store_spec(url: str | Mapping[str, Any], setting: str) -> str | dict[str, Any]:
    """Return the argument of KvStore.open; its path ends with a slash.

    Args:
        url: file:///path, file://relative/path or just a path; gs://bucket/path, s3://bucket/path, memory://name; or
            the specification of a KvStore as a dict, for what no URL can say (the endpoint of an S3 store).

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


@functools.cache
def _memory() -> Any:
    """Return one context for all, so that stores of this process share memory://."""
    import tensorstore as ts

    return ts.Context()
