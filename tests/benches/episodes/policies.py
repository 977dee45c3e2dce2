"""Policies of this bench: parameters of a run that was just made, and the engine that draws greedily by them."""

from functools import partial
from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.reader import list_steps, restore_params
from axlearn_like.layers.base import Params, build_abstract, split
from axlearn_like.tokenizers.protocol import Tokenizer, completion_text
from axlearn_like.training.trainer import Trainer
from rl.rollout.engine import RolloutEngine
from rl.rollout.sampling import Sampler


def trained_params(cfg: Trainer.Config, run: Path) -> Params:
    """Train in a new run directory; returns the parameters of its last checkpoint."""
    cfg.build().run(run)
    checkpoints = run / "checkpoints"
    abstract = split(build_abstract(cfg.model))[1]
    return restore_params(checkpoints / str(max(list_steps(checkpoints))), abstract)


def greedy_engine(cfg: Trainer.Config, params: Params, tokenizer: Tokenizer, **fields: Any) -> RolloutEngine:
    """Return an engine of this model with the parameters; `fields`: others of its config."""
    sampler = Sampler.Config(temperature=0.0)
    engine_cfg = RolloutEngine.Config(model=cfg.model, stop_tokens=(tokenizer.eos,), sampler=sampler, **fields)
    engine = engine_cfg.build(decode=partial(completion_text, tokenizer))
    engine.set_weights(params, 0)
    return engine
