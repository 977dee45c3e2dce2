"""Branching rollouts: the samples of a prompt share their first tokens, as the leaves of a tree share its branches.

    engine draws roots -> at `at[0]` tokens each splits into `ways` -> at `at[1]` each of these splits -> ... -> samples

Each sample is drawn from the policy like any other, but samples of one branch are not independent. What they share is
drawn once, and with `trainer.packing.tree` is trained on once. The draws depend on (seed, prompt, sample, position)
alone, so a lost group is drawn again to the bit.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from rl.environments.task import environments_of
from rl.protocol.experiment import ExperimentFields
from rl.protocol.messages import FinishReason, Prompt, Rollout
from rl.rollout.agent_loops.commands import AgentLoop, Command, Completion, Fork, Generate
from rl.rollout.request import Request

Commands = Generator[Command, Any, FinishReason | None]


class Branching(Configurable):
    """Requests whose completions split into several at fixed numbers of tokens."""

    class Config(ConfigBase["Branching"]):
        """Fields of a tree of samples."""

        at: tuple[int, ...] = REQUIRED  # tokens of a completion at which it splits, ascending
        ways: int = 2  # completions into which each splits

        def check_fields(self) -> None:
            """Refuse what is no tree."""
            ascending = all(before < after for before, after in zip((0, *self.at), self.at, strict=False))
            self.require("at", bool(self.at) and ascending, "ascending numbers of tokens, each 1 or more")
            self.require("ways", self.ways >= 2, "2 or more")

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse groups that are no whole number of trees, of which there must be two."""
            samples, max_new, leaves = experiment.samples_per_prompt, experiment.max_new_tokens, self.leaves
            self.require("at", max(self.at, default=0) < max_new, f"less than max_new_tokens={max_new}")
            expected = f"a multiple of {leaves} (branching.ways ** len(branching.at)), {2 * leaves} or more"
            why = "; a group of one tree has no gradient for what all its samples share"
            experiment.require("samples_per_prompt", samples % leaves == 0 and samples >= 2 * leaves, expected + why)
            whole = not environments_of(experiment.tasks)
            experiment.require("branching", whole, "None with environments, whose episodes are whole")

        @property
        def leaves(self) -> int:
            """Samples that come of one root."""
            return self.ways ** len(self.at)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def request(self, prompt: Prompt, samples: int, seed: int, partial: Iterable[Rollout] = ()) -> Request:
        """Return a request whose output is `samples` rollouts, of sample ids from 0; `partial`: from `continuable`."""
        if partial := tuple(partial):  # all have split: each goes on by itself
            return Request(prompt, samples, seed, partial=partial)
        roots = samples // self.cfg.leaves
        return Request(prompt, roots, seed, agent_loop=self._loop(0, roots))

    def continuable(self, rollouts: Sequence[Rollout], samples: int) -> tuple[Rollout, ...]:
        """Return the rollouts of prompts that have all their samples, so all have split; others are drawn again."""
        found = Counter(rollout.prompt_id for rollout in rollouts)
        return tuple(rollout for rollout in rollouts if found[rollout.prompt_id] == samples)

    def _loop(self, level: int, completions: int, over: bool = False) -> AgentLoop:
        """Return the loop of a completion that has split `level` times.

        Args:
            level: how often it has split.
            completions: number of completions of its prompt at this level; their sample ids are 0, 1, 2 ...
            over: it has ended before it could split again, so its copies are whole already.
        """
        cfg = self.cfg

        def play(completion: Completion) -> Commands:
            count, ended = completions, over
            for depth in range(level, len(cfg.at)):
                if not ended:
                    reason = yield Generate(cfg.at[depth] - len(completion.output_tokens))
                    ended = reason == "stop"
                first = count + completion.sample * (cfg.ways - 1)
                count *= cfg.ways
                copies = tuple(range(first, first + cfg.ways - 1))
                yield Fork(self._loop(depth + 1, count, ended), copies)
            if ended:
                return "stop"
            yield Generate()
            return None

        return play
