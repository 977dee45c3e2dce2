"""Fields of the controller."""

from typing import Any, Literal, override

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.tokenizers.protocol import Tokenizer
from rl.controller.prompt_pool import PromptPool
from rl.protocol.timeouts import Timeouts
from rl.tasks.mixture import TaskMixture
from rl.tasks.prompts import LongPrompts, PromptMaker
from rl.tasks.skipped import SkippedProblems

_RENAMED = {"groups": "prompts_per_step", "max_prompt": "max_prompt_tokens", "samples": "samples_per_prompt"}


class ControllerConfig[T](ConfigBase[T], renamed=_RENAMED):
    """Fields of `Controller.Config`. They stand here for the plan."""

    tasks: ConfigBase[Any] = REQUIRED  # TaskMixture, or another class with its `train`
    tokenizer: ConfigBase[object] = REQUIRED  # config of a Tokenizer
    num_steps: int = REQUIRED
    prompts_per_step: int = REQUIRED  # prompts in a batch
    samples_per_prompt: int = REQUIRED  # rollouts of each prompt
    groups_per_lease: int = REQUIRED
    staleness: int = 0  # updates that a rollout may be behind the trainer
    weights: Literal["pinned", "newest", "in_flight"] = "pinned"
    lease_seconds: float = 120.0  # seconds from a worker's last call to the end of its lease
    max_prompt_tokens: int | None = None  # limit of a prompt's tokens; None: no limit
    long_prompts: LongPrompts = "skip"  # longer prompts: take the next problem, keep the last tokens, or fail
    problem_seconds: float = 10.0  # limit of seconds to make a problem, which is left out beyond; 0: no limit
    pool: PromptPool.Config | None = None  # draws problems again by how often they were solved; None: all are new
    oversample: float = 1.0  # limit of drawn groups / `prompts_per_step`; they replace groups of equal rewards
    audit: float = 0.0  # share of each worker's rollouts that another worker draws again, to be compared
    timeouts: Timeouts.Config = Timeouts.Config()

    @override
    def check_fields(self) -> None:
        self.require("audit", 0 <= self.audit <= 1, "a share of the rollouts, 0 to 1")
        some = self.oversample == 1 or self.samples_per_prompt > 1
        self.require("oversample", some, "1 with one sample of each prompt: there are no rewards to compare")
        self.require_least(0, "staleness", "problem_seconds")
        self.require_least(1, "max_prompt_tokens", "oversample")
        known = self.pool is None or isinstance(self.tasks, TaskMixture.Config)
        self.require("pool", known, "None, or tasks that are a TaskMixture: it knows problems by their ids")
        each = self.groups_per_lease
        self.require(
            "groups_per_lease",
            each >= 1 and self.prompts_per_step % each == 0,
            f"a divisor of prompts_per_step={self.prompts_per_step}",
        )

    @property
    def most_groups(self) -> int:
        """Groups that a step may draw."""
        each = self.groups_per_lease
        return max(self.prompts_per_step, int(self.oversample * self.prompts_per_step) // each * each)

    def prompt_maker(self, tokenizer: Tokenizer, skipped: SkippedProblems | None = None) -> PromptMaker:
        """Build the maker of prompts by the rules of this config."""
        rules: dict[str, Any] = {"max_prompt_tokens": self.max_prompt_tokens, "long_prompts": self.long_prompts}
        return PromptMaker(tokenizer, **rules, seconds=self.problem_seconds, skipped=skipped)
