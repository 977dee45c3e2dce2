"""Results of a verifier kept in a file, by its version, its config, the problem and the answer."""

import hashlib
import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, override

from axlearn_like.config import REQUIRED, ConfigBase, strip_comments, to_text, walk, walk_configs
from rl.tasks.mixture import TaskMixture
from rl.verification.scorers import Scorer

_ROOMS = ("axlearn_like", "mesh", "models", "rl")


class ResultFile:
    """A table of results by key, shared by processes. What was stored with another version is not found."""

    def __init__(self, path: str, version: str):
        self._version = version
        Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(Path(path).expanduser(), timeout=30.0, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        self.hits = self.misses = 0

    def get(self, *parts: Any) -> Any:
        """Return the result that was stored for these parts, or None."""
        row = self._database.execute("SELECT value FROM results WHERE key = ?", (self._key(parts),)).fetchone()
        self.hits, self.misses = self.hits + (row is not None), self.misses + (row is None)
        return None if row is None else json.loads(row[0])

    def put(self, value: Any, *parts: Any) -> None:
        """Store a result."""
        self._database.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", (self._key(parts), json.dumps(value)))

    def _key(self, parts: tuple[Any, ...]) -> str:
        return hashlib.blake2b(json.dumps([self._version, *parts]).encode(), digest_size=20).hexdigest()


def version_of(cfg: Scorer.Config) -> str:
    """Return a text that differs when a scorer of this config may score otherwise.

    It has the config, the `VERSION` of every scorer and term in it, however deep, a digest of each file that defines a
    function which the config names or a class that is not of this project's library, and digests of the tasks' rows.
    Not seen: modules that those files import, installed packages, weights at a path, the model behind a URL.
    """
    parts = [strip_comments(to_text(cfg))]
    for path, node in walk_configs(cfg):
        if (version := getattr(type(node).__owner__, "VERSION", None)) is not None:
            parts.append(f"{path} VERSION {version}")
    parts += sorted({f"{place.name} {_digest(place)}" for place in _files(cfg)})
    mixtures = {to_text(node): node for _, node in walk_configs(cfg) if isinstance(node, TaskMixture.Config)}
    parts += [json.dumps(node.build().digests(), sort_keys=True) for node in mixtures.values()]
    return "\n".join(parts)


def _files(cfg: ConfigBase[Any]) -> Iterator[Path]:
    """Yield the files of the functions that a config names, and of classes outside of this project's library."""
    named = [leaf for _, leaf in walk(cfg) if callable(leaf)]
    for one in [type(node).__owner__ or type(node) for _, node in walk_configs(cfg)] + named:
        for found in one.__mro__ if isinstance(one, type) else (one,):
            library = isinstance(found, type) and found.__module__.partition(".")[0] in _ROOMS
            file = getattr(sys.modules.get(found.__module__), "__file__", None)
            if file is not None and not library:
                yield Path(file)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=20).hexdigest()


class Cached(Scorer):
    """Another scorer, whose results are kept in a file; failures are not. For those that cost more than a look-up.

    A result is found again as long as `version_of` the scorer's config is what it was.
    """

    class Config(Scorer.Config):
        scorer: Scorer.Config = REQUIRED
        path: str = REQUIRED

        @override
        def reaches(self) -> tuple[str, ...]:
            return (str(self.path),)

        @override
        def check_fields(self) -> None:
            self.require("scorer", not self.scorer.wants(), "a scorer of one answer, which is all that the key holds")

    def __init__(self, cfg: Config):
        self._scorer: Scorer = cfg.scorer.build()
        self.results = ResultFile(cfg.path, version_of(cfg.scorer))

    @override
    def score(self, problem_id: int, answer: str) -> Any:
        found = self.results.get(problem_id, answer)
        if found is None:
            found = self._scorer.score(problem_id, answer)
            self.results.put(found, problem_id, answer)
        return found
