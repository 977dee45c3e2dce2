"""Retrieval as a tool: the passages of a local corpus that a query matches best, ranked by BM25."""

from typing import Any, override

from axlearn_like.config import REQUIRED, ConfigBase
from mesh.errors import UserError, did_you_mean
from rl.environments.tools.bm25 import BM25
from rl.environments.tools.tool import Tool
from rl.tasks.rows.sources import RowSource


class RetrievalTool(Tool):
    """`search(query)`: the best passages, one a paragraph. The index is built once in a process."""

    class Config(Tool.Config):
        name: str = "search"
        description: str = "Search the corpus. Returns the passages that match the query best."
        pure: bool = True
        rows: ConfigBase[Any] = REQUIRED  # the passages: RowFiles, RowFunction, or another source of rows
        text: str = "text"  # field of a row with the passage
        heading: str | None = None  # field with a heading, which is searched and shown too
        passages: int = 3  # shown for a query

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require_least(1, "passages")

    def __init__(self, cfg: Config):
        source: RowSource = cfg.rows.build()
        fields = [cfg.text] if cfg.heading is None else [cfg.heading, cfg.text]
        self._passages: list[str] = []
        for row, where in source.rows():
            if missing := [field for field in fields if not isinstance(row.get(field), str)]:
                hint = did_you_mean(missing[0], row, limit=len(row))
                raise UserError(f"RetrievalTool: {where} has no text {missing[0]!r}{hint}")
            self._passages.append("\n".join(row[field] for field in fields))
        if not self._passages:
            raise UserError("RetrievalTool.rows: there is no passage")
        self._index, self._count = BM25(self._passages), cfg.passages

    @override
    def call(self, query: str) -> str:
        found = self._index.search(query, self._count)
        return "\n\n".join(self._passages[number] for number, _ in found) or "nothing found"
