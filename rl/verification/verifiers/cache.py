"""Results of a verifier kept in a file, by its version, its config, the problem and the answer."""

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any, override

from axlearn_like.config import REQUIRED, to_text
from rl.verification.scorers import Scorer

__all__ = ["Cached", "ResultFile"]


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


class Cached(Scorer):
    """Another scorer, whose results are kept in a file; failures are not. For those that cost more than a look-up."""

    class Config(Scorer.Config):
        scorer: Scorer.Config = REQUIRED
        path: str = REQUIRED

        @override
        def wants(self) -> frozenset[str]:
            return self.scorer.wants()

        @override
        def environment(self) -> tuple[str, ...]:
            return self.scorer.environment()

        @override
        def check_fields(self) -> None:
            self.require("scorer", not self.scorer.wants(), "a scorer of one answer, which is all that the key holds")

    def __init__(self, cfg: Config):
        self._scorer: Scorer = cfg.scorer.build()
        version = getattr(type(self._scorer), "VERSION", 0)
        self.results = ResultFile(cfg.path, f"{version}\n{to_text(cfg.scorer)}")

    @override
    def score(self, problem_id: int, answer: str) -> Any:
        found = self.results.get(problem_id, answer)
        if found is None:
            found = self._scorer.score(problem_id, answer)
            self.results.put(found, problem_id, answer)
        return found
