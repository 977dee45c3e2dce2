"""A second tier of checkpoints: copies in another directory or a bucket, made beside training.

Local saves are fast and may be frequent; the machine's disk may be gone tomorrow. A remote checkpoint is a directory
named by its step, with the files as they are and an object `COMPLETE`, written last, that lists their sizes and
digests: without it there is no checkpoint. Files of parameters that do not change (`frozen`, `constant`) are stored
once for all checkpoints, under `shared/` by their digests.

Compared with a `CheckpointManager` of orbax.checkpoint 0.12 on gs://: that is one tier whose saves go to the bucket; it
keeps no digests of files and does not notice another run's config.
"""

import json
import queue
import shutil
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Any, override

import xxhash

from axlearn_like.checkpoint.reader import CONSTANT, FROZEN
from axlearn_like.checkpoint.versions import CheckpointError
from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.run.directory import same_run
from axlearn_like.run.events import EventLog
from axlearn_like.run.object_store import open_store, store_spec
from mesh.files.hard_links import link_tree

_COMPLETE, _CONFIG, _SHARED = "COMPLETE", "config.txt", "shared"
_ATTEMPTS, _PAUSE = 3, 2.0  # a bucket's own retries come first


class RemoteTier(Configurable):
    """Remote storage for every n-th step's checkpoint; the newest is fetched where no local one is as new."""

    class Config(ConfigBase["RemoteTier"]):
        url: str = REQUIRED  # a directory, file://, gs://bucket/path or s3://bucket/path; one for each run
        copy_every: int = REQUIRED  # steps between copies; only steps saved locally are copied
        keep: int = 2  # newest remote checkpoints kept
        timeout: float = 600.0  # seconds for one file

        @override
        def reaches(self) -> tuple[str, ...]:
            return (str(self.url),)

        @override
        def check_fields(self) -> None:
            self.require_least(1, "copy_every", "keep")
            with self.errors_in("url"):
                store_spec(self.url, "url")

    def __init__(self, cfg: Config, *, directory: Path, config: str, events: EventLog):
        """`directory` holds the local checkpoints of the run with this `config`. UserError: an impossible URL."""
        self._cfg, self._directory, self._config, self._events = cfg, directory, config.encode(), events
        self._store = open_store(cfg.url, "remote.url")
        self._staged = directory.parent / f"{directory.name}.outgoing"
        shutil.rmtree(self._staged, ignore_errors=True)  # remains of a killed process
        self._queue: queue.Queue[int | None] = queue.Queue()
        self._digests: dict[tuple[int, int, int], tuple[int, str]] = {}  # linked files: (size, digest)
        self._error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._work, name="remote-checkpoints", daemon=True)
        self._thread.start()

    def due(self, step: int) -> bool:
        """Return True if the checkpoint of `step` is to be copied."""
        return step % self._cfg.copy_every == 0

    def steps(self) -> list[int]:
        """Return the steps of complete remote checkpoints, oldest first."""
        keys = [key.decode(errors="replace") for key in self._do("list", "", self._store.list())]
        complete = [key.removesuffix(f"/{_COMPLETE}") for key in keys if key.endswith(f"/{_COMPLETE}")]
        return sorted(int(step) for step in complete if step.isascii() and step.isdigit())

    def fetch_newer(self, local: int | None) -> int | None:
        """Fetch the newest remote checkpoint if it is newer than the newest local one, and return its step.

        Raises:
            CheckpointError: it cannot be read, is not what was written, or is of another run.
        """
        self._check_config()
        newest = max(self.steps(), default=None)
        if newest is None or (local is not None and newest <= local):
            return None
        began, target = time.monotonic(), self._directory / str(newest)
        incoming = self._directory.parent / f"{self._directory.name}.incoming"
        shutil.rmtree(incoming, ignore_errors=True)
        for name, (size, digest, *key) in self._listing(newest).items():
            if not _within(name):
                raise CheckpointError(f"remote checkpoint {self._cfg.url}/{newest} lists {name!r}: no path within it")
            content = self._read(key[0] if key else f"{newest}/{name}")
            if len(content) != size or xxhash.xxh3_128_hexdigest(content) != digest:
                raise CheckpointError(
                    f"remote checkpoint {self._cfg.url}/{newest} is damaged: {name} is not what was written; rename "
                    f"{newest}/{_COMPLETE} there to go on from an older one"
                )
            path = incoming / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self._directory.mkdir(parents=True, exist_ok=True)
        incoming.rename(target)
        self._events.append("trainer", "fetched", step=newest, seconds=round(time.monotonic() - began, 3))
        return newest

    def copy(self, step: int) -> None:
        """Start copying a finished local checkpoint, which may be deleted locally before the copy is complete."""
        link_tree(self._directory / str(step), self._staged / str(step))
        self._queue.put(step)

    def check(self) -> None:
        """Raise CheckpointError if a copy has failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for the copies under way. CheckpointError: one has failed."""
        self._queue.put(None)
        self._thread.join()
        self.check()

    def _work(self) -> None:
        while (step := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._copy(step)
                except CheckpointError as error:
                    self._error = error
                except Exception as error:
                    self._error = CheckpointError(f"could not copy checkpoint {step} to {self._cfg.url}: {error}")
            shutil.rmtree(self._staged / str(step), ignore_errors=True)
        shutil.rmtree(self._staged, ignore_errors=True)

    def _copy(self, step: int) -> None:
        if step in self.steps():
            return  # the same run and step, so the same content
        began, folder, listing, size = time.monotonic(), self._staged / str(step), {}, 0
        there = self._shared()
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = path.relative_to(folder).as_posix()
            if name.partition("/")[0] in (FROZEN, CONSTANT):
                nbytes, digest = self._digest(path)
                listing[name] = (nbytes, digest, key := f"{_SHARED}/{digest}")
                if key not in there:
                    self._write(key, path.read_bytes())
                    size += nbytes
                    there.add(key)
                continue
            content = path.read_bytes()
            listing[name] = (len(content), xxhash.xxh3_128_hexdigest(content))
            self._write(f"{step}/{name}", content)
            size += len(content)
        self._write(_CONFIG, self._config)
        self._write(f"{step}/{_COMPLETE}", json.dumps(listing).encode())
        for old in self.steps()[: -self._cfg.keep]:
            self._delete(old)
        seconds = round(time.monotonic() - began, 3)
        self._events.append("trainer", "copied", step=step, seconds=seconds, nbytes=size, to=self._cfg.url)

    def _check_config(self) -> None:
        found = self._do("read", _CONFIG, self._store.read(_CONFIG))
        if found.state != "value" or same_run(found.value.decode(errors="replace"), self._config.decode()):
            return
        theirs, ours = (set(text.decode(errors="replace").splitlines()) for text in (found.value, self._config))
        differing = [f"  -{line}" for line in sorted(theirs - ours)] + [f"  +{line}" for line in sorted(ours - theirs)]
        raise CheckpointError(
            f"{self._cfg.url} holds checkpoints of a run of another config (-: there, +: this run):\n"
            + "\n".join(differing[:6])
            + "\nGive each run a remote.url of its own"
        )

    def _delete(self, step: int) -> None:
        self._write(f"{step}/{_COMPLETE}", None)  # first, so that no half checkpoint is listed
        for key in self._do("list", f"{step}/", self._store.list()):
            if key.startswith(f"{step}/".encode()):
                self._write(key.decode(), None)
        spec = self._store.spec().to_json()
        if spec["driver"] == "file":  # directories remain
            shutil.rmtree(Path(spec["path"]) / str(step), ignore_errors=True)

        used = {key for left in self.steps() for _, _, *keys in self._listing(left).values() for key in keys}
        for key in self._shared() - used:
            self._write(key, None)

    def _shared(self) -> set[str]:
        """Return the keys of files that several checkpoints may have."""
        keys = (key.decode(errors="replace") for key in self._do("list", _SHARED, self._store.list()))
        return {key for key in keys if key.startswith(f"{_SHARED}/")}

    def _digest(self, path: Path) -> tuple[int, str]:
        """Return size and digest of a file that further checkpoints link to: it is read once."""
        stat = path.stat()
        place = (stat.st_dev, stat.st_ino, stat.st_mtime_ns)
        if place not in self._digests:
            content = path.read_bytes()
            self._digests[place] = len(content), xxhash.xxh3_128_hexdigest(content)
        return self._digests[place]

    def _listing(self, step: int) -> dict[str, Any]:
        return json.loads(self._read(f"{step}/{_COMPLETE}"))

    def _read(self, name: str) -> bytes:
        found = self._do("read", name, self._store.read(name))
        if found.state != "value":
            raise CheckpointError(f"remote checkpoint {self._cfg.url}: {name} is missing")
        return found.value

    def _write(self, name: str, content: bytes | None) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                self._do("write", name, self._store.write(name, content))
                return
            except CheckpointError:
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE * (attempt + 1))

    def _do(self, verb: str, name: str, future: Any) -> Any:
        try:
            return future.result(timeout=self._cfg.timeout)
        except Exception as error:
            reason = f"{error}".split("\n", 1)[0][:300] or type(error).__name__
            raise CheckpointError(f"could not {verb} {name or 'the listing'} at {self._cfg.url}: {reason}") from error


def _within(name: str) -> bool:
    """Return True for the path of a file within a folder: a listing may be of anyone who can write the bucket."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts
