"""A tree of small configurable classes, with postponed annotations, for the config tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from axlearn_like.config import REQUIRED, ConfigBase, Configurable


def relu(x: float) -> float:
    return max(x, 0.0)


def schedule(peak: float, *, warmup: int = 10, mode: Literal["cosine", "linear"] = "cosine") -> Any:
    return ("schedule", peak, warmup, mode)


def chain(*parts: Any, **names: Any) -> Any:
    return ("chain", parts, names)


class Norm(Configurable):
    class Config(ConfigBase["Norm"]):
        dim: int = REQUIRED
        eps: float = 1e-6

    def __init__(self, cfg: Config, *, seed: int = 0):
        self.cfg, self.seed = cfg, seed


class Ffn(Configurable):
    class Config(ConfigBase["Ffn"]):
        dim: int = REQUIRED
        hidden: int = 32
        activation: Callable[[float], float] = relu

    def __init__(self, cfg: Config, *, seed: int = 0):
        self.cfg = cfg


class Experts(Ffn):
    class Config(Ffn.Config):
        num_experts: int = 4


class Block(Configurable):
    class Config(ConfigBase["Block"]):
        dim: int = REQUIRED
        norm: Norm.Config = Norm.Config()
        ffn: ConfigBase[Ffn] = Ffn.Config()
        tail: ConfigBase[Tail] | None = None  # a class further down

    def __init__(self, cfg: Config, *, seed: int = 0):
        self.cfg = cfg
        self.norm = cfg.norm.set(dim=cfg.dim).build(seed=seed)
        self.ffn = cfg.ffn.clone(dim=cfg.dim).build(seed=seed)


class Tail(Configurable):
    class Config(ConfigBase["Tail"]):
        size: int = 1

    def __init__(self, cfg: Config): ...


class Model(Configurable):
    class Config(ConfigBase["Model"]):
        dim: int = REQUIRED
        blocks: tuple[Block.Config, ...] = (Block.Config(), Block.Config())
        named: dict[str, ConfigBase] = {}
        mode: Literal["fast", "exact"] = "fast"
        mesh: tuple[int, ...] = (1, 1)
        tags: list[str] = []
        weights: dict[str, float] = {}
        note: str | None = None
        dropout: float | None = None
        ratio: int | float = 1
        kind: type = int
        extra: Any = None

    def __init__(self, cfg: Config, *, seed: int = 0):
        self.cfg = cfg
        self.blocks = [block.set(dim=cfg.dim).build(seed=seed) for block in cfg.blocks]
