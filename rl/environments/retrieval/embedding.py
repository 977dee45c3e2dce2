"""Embeddings of texts: by a function of the user's, or by an endpoint that speaks OpenAI's `/embeddings`."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from mesh.errors import UserError
from rl.environments.retrieval.clusters import Array
from rl.verification.endpoint import URL_FORM, EndpointClient, is_endpoint, reached


class Embedder(Configurable, abc.ABC):
    """Texts as vectors of length 1, so that the nearest is the one with the largest cosine."""

    class Config(ConfigBase["Embedder"]):
        pass

    def __init__(self, cfg: Any):
        self.cfg = cfg

    def embed(self, texts: Sequence[str]) -> Array:
        """Return float32 [texts, width] (UserError: not a row of finite numbers for each, or one of length 0)."""
        name = type(self).__name__
        try:
            made = np.asarray(self.vectors(texts), np.float32)
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}: no array of numbers, a row for each text ({error})") from error
        if made.ndim != 2 or len(made) != len(texts) or made.shape[1] == 0:
            raise UserError(f"{name}: an array of shape {made.shape} for {len(texts)} texts; expected a row for each")
        lengths = np.linalg.norm(made, axis=1, keepdims=True)
        if wrong := np.flatnonzero(~(np.isfinite(lengths[:, 0]) & (lengths[:, 0] > 0))).tolist():
            raise UserError(f"{name}: the vector of {texts[wrong[0]]!r:.60} has no finite length above 0")
        return made / lengths

    @abc.abstractmethod
    def vectors(self, texts: Sequence[str]) -> Any:
        """Return [texts, width] numbers of any length."""


class FunctionEmbedder(Embedder):
    """Vectors that a top-level function returns for a list of texts, in their order."""

    class Config(Embedder.Config):
        function: Callable[..., Any] = REQUIRED
        arguments: dict[str, Any] = {}

    @override
    def vectors(self, texts: Sequence[str]) -> Any:
        return self.cfg.function(list(texts), **self.cfg.arguments)


class EndpointEmbedder(Embedder):
    """Vectors that an endpoint returns; `axl` asks it in batches."""

    class Config(Embedder.Config):
        url: str = REQUIRED  # URL of the endpoint, such as http://localhost:8000/v1
        model: str = REQUIRED
        key_variable: str | None = None  # environment variable that holds the key
        batch: int = 64  # texts of a request
        timeout_s: float = 30.0
        attempts: int = 3
        pause_s: float = 0.5  # seconds before the second attempt; doubled before each later one

        @override
        def reaches(self) -> tuple[str, ...]:
            return (reached(str(self.url), self.key_variable),)

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require_least(1, "batch", "attempts")
            self.require("url", is_endpoint(self.url), URL_FORM)
            self.require("timeout_s", self.timeout_s > 0, "seconds, more than 0")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        patience: dict[str, Any] = {"timeout_s": cfg.timeout_s, "attempts": cfg.attempts, "pause_s": cfg.pause_s}
        self._endpoint = EndpointClient("EndpointEmbedder", cfg.url, cfg.key_variable, **patience)

    @override
    def vectors(self, texts: Sequence[str]) -> Any:
        rows: list[Any] = []
        for start in range(0, len(texts), self.cfg.batch):
            batch = list(texts[start : start + self.cfg.batch])
            body = {"model": self.cfg.model, "input": batch, "encoding_format": "float"}
            rows += self._endpoint.post("embeddings", body, functools.partial(_rows, len(batch)))
        return rows


def _rows(count: int, reply: Any) -> list[list[float]]:
    """Return the vectors of a reply in the order of the texts; the endpoint may list them in any."""
    found = {int(one["index"]): one["embedding"] for one in reply["data"]}
    if found.keys() != set(range(count)):
        raise ValueError(f"vectors of the texts {sorted(found)}; expected 0 to {count - 1}")
    return [found[number] for number in range(count)]
