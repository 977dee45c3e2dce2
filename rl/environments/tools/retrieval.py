"""Retrieval as a tool: the passages of a local corpus that match a query best, of those that the episode may see."""

from collections.abc import Mapping
from typing import Any, override

from axlearn_like.config import REQUIRED, ConfigBase
from mesh.errors import UserError, did_you_mean
from rl.environments.retrieval.corpus import Corpus, Passage, Reader, VectorCorpus, WordCorpus
from rl.environments.retrieval.embedding import Embedder
from rl.environments.tools.tool import Tool
from rl.tasks.rows.sources import RowSource


class RetrievalTool(Tool):
    """`search(query)`: the best passages, one a paragraph. The index is built once in a process.

    With `access`, an episode sees passages of its tenants and of everyone ("*"). A tenant is `FIELD:VALUE`, a field of
    the episode's row that `tenants` names and its value, such as `user:ann` or `problem_id:7`.
    """

    class Config(Tool.Config):
        name: str = "search"
        description: str = "Search the corpus. Returns the passages that match the query best."
        pure: bool = True
        rows: ConfigBase[Any] = REQUIRED  # the passages: RowFiles, RowFunction, or another source of rows
        text: str = "text"  # field of a row with the passage
        heading: str | None = None  # field with a heading, which is searched and shown too
        access: str | None = None  # field with the tenants that see a passage, a text or a list; None: everyone does
        hidden: str | None = None  # field that is true for passages that nobody may find, such as hidden answers
        tenants: tuple[str, ...] = ()  # fields of an episode's row that name its tenants
        own: str | None = None  # field of an episode's row with passages that it alone sees, a list of texts
        embedder: Embedder.Config | None = None  # vectors in place of words
        index_file: str | None = None  # file that keeps the vectors between runs; made if it is not there
        passages: int = 3  # shown for a query

        @override
        def reaches(self) -> tuple[str, ...]:
            return () if self.index_file is None else (str(self.index_file),)

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require_least(1, "passages")
            named = self.index_file is None or self.embedder is not None
            self.require("index_file", named, "an embedder beside it: words are counted at every start")
            self.require("tenants", not self.tenants or self.access is not None, "a field `access` of the passages too")

    def __init__(self, cfg: Config):
        self.cfg = cfg
        passages = _passages(cfg)
        self._corpus: Corpus = (
            WordCorpus(passages)
            if cfg.embedder is None
            else VectorCorpus(passages, cfg.embedder.build(), cfg.index_file)
        )
        self._everyone = OpenRetrieval(self._corpus.open(()), cfg.passages)

    @override
    def open(self, row: Mapping[str, Any]) -> Tool:
        cfg = self.cfg
        if not cfg.tenants and cfg.own is None:
            return self
        names = [f"{field}:{value}" for field in cfg.tenants for value in _listed(_field(row, field, "tenants"))]
        own = [] if cfg.own is None else _listed(_field(row, cfg.own, "own"))
        if wrong := [text for text in own if not isinstance(text, str)]:
            raise UserError(f"RetrievalTool.own: {cfg.own!r} of the row has {wrong[0]!r:.60}; expected texts")
        return OpenRetrieval(self._corpus.open(names, own), cfg.passages)

    @override
    def call(self, query: str) -> str:
        return self._everyone.call(query)


class OpenRetrieval(Tool):
    """The tool of one episode, with its tenants' passages."""

    def __init__(self, reader: Reader, passages: int):
        """Store what the episode sees, and how many passages a query shows."""
        self._reader, self._passages = reader, passages

    @override
    def call(self, query: str) -> str:
        return "\n\n".join(self._reader.search(query, self._passages)) or "nothing found"

    @override
    def close(self) -> None:
        self._reader.close()


def _passages(cfg: RetrievalTool.Config) -> list[Passage]:
    """Return the passages that somebody may find, with who may."""
    source: RowSource = cfg.rows.build()
    fields = [cfg.text] if cfg.heading is None else [cfg.heading, cfg.text]
    found: list[Passage] = []
    for row, where in source.rows():
        if missing := [field for field in fields if not isinstance(row.get(field), str)]:
            hint = did_you_mean(missing[0], row, limit=len(row))
            raise UserError(f"RetrievalTool: {where} has no text {missing[0]!r}{hint}")
        if cfg.hidden is not None and not isinstance(row.get(cfg.hidden), bool):
            raise UserError(f"RetrievalTool.hidden: {where} has no true or false {cfg.hidden!r}")
        text = "\n".join(row[field] for field in fields)
        if cfg.access is None:
            passage = Passage(text)
        else:
            tenants = tuple(_listed(row.get(cfg.access)))
            if not tenants or not all(isinstance(one, str) and one for one in tenants):
                raise UserError(f"RetrievalTool.access: {where} has no tenants {cfg.access!r}; expected names, or '*'")
            passage = Passage(text, tenants)
        if cfg.hidden is None or not row[cfg.hidden]:
            found.append(passage)
    if not found:
        raise UserError("RetrievalTool.rows: there is no passage")
    return found


def _field(row: Mapping[str, Any], field: str, of: str) -> Any:
    if field not in row:
        raise UserError(f"RetrievalTool.{of}: the episode's row has no {field!r}{did_you_mean(field, row)}")
    return row[field]


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
