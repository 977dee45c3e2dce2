"""A model alone as something to be served: without the tasks and the learner of an experiment."""

from functools import partial
from typing import Any

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.tokenizers.embedding import check_tokenizer
from axlearn_like.tokenizers.protocol import Tokenizer, completion_text
from axlearn_like.training.program import check_length
from rl.rollout.engine import RolloutEngine
from rl.rollout.sampling import Sampler


class ServedModel(Configurable):
    """A policy, its tokenizer and the sizes of an engine. Its parameters are those that the policy begins with."""

    class Config(ConfigBase["ServedModel"]):
        policy: ConfigBase = REQUIRED
        tokenizer: ConfigBase = REQUIRED
        max_prompt: int = 1024  # tokens
        max_new: int = 1024  # tokens, the stop token included
        sampler: Sampler.Config = Sampler.Config()
        engine: RolloutEngine.Config = RolloutEngine.Config(max_num_seqs=16)
        start_from: None = None  # the policy says it
        seed: int = 0  # of parameters that are random

        def check(self) -> None:
            """Refuse a tokenizer or lengths that the policy has no room for."""
            super().check()
            check_tokenizer(self.tokenizer, self.policy)
            check_length(self.policy, self.max_prompt + self.max_new, "max_prompt + max_new", "policy")

        def check_fields(self) -> None:
            """Refuse lengths that no engine can have."""
            self.require_least(1, "max_prompt", "max_new")

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.tokenizer: Tokenizer = cfg.tokenizer.build()
        self.engine_cfg = cfg.engine.filled_from(
            cfg, model=cfg.policy, stop_tokens=self.tokenizer.stop_ids, sampler=cfg.sampler
        )

    def make_engine(self, **changes: Any) -> RolloutEngine:
        """Build a rollout engine; `changes` are fields of its config."""
        return self.engine_cfg.clone(**changes).build(decode=partial(completion_text, self.tokenizer))
