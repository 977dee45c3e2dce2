"""Forced interruption of long thinking: a completion that is still thinking at a limit is given the words that end it.

    draw up to the limit -> still thinking: the words are appended, not drawn -> draw the answer

So an answer has room however long the thinking would have been (Qwen3; ScaleRL, arXiv 2510.13786). Nothing is learned
from the words that were given, and the draws behind them depend on (seed, prompt, sample, position) as ever.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import Any

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input.shuffle import derived_seed
from axlearn_like.tokenizers.inside import encode_inside
from axlearn_like.tokenizers.protocol import Tokenizer
from rl.environments.task import environments_of
from rl.protocol.experiment import ExperimentFields
from rl.protocol.messages import FinishReason, Prompt, Rollout
from rl.rollout.agent_loops.commands import AgentLoop, Command, Completion, Generate, Observe
from rl.rollout.request import Request

Commands = Generator[Command, Any, FinishReason | None]


class Interruption(Configurable):
    """Requests whose completions are interrupted at a number of tokens."""

    class Config(ConfigBase["Interruption"]):
        """Fields of the limit and the words."""

        at: int = REQUIRED  # tokens of a completion after which thinking is interrupted
        spread: int = 0  # limits are up to so many tokens later, another one for each sample, so that none is learned
        words: str = REQUIRED  # the text that is appended, such as "Time is up.</think>"
        # The text that ends thinking by itself; a completion that has it, or has ended, is left alone
        until: str = REQUIRED

        def check_fields(self) -> None:
            """Refuse a limit that is none, and words that leave the completion thinking."""
            self.require_least(1, "at")
            self.require_least(0, "spread")
            self.require("until", bool(self.until), "a text, such as '</think>'")
            self.require(
                "words", self.until in self.words, f"a text with until={self.until!r}, which ends the thinking"
            )

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse completions that another loop steers."""
            free = not environments_of(experiment.tasks) and experiment.branching is None
            expected = "None with environments or branching, which have loops of their own"
            experiment.require("interruption", free, expected)

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer):
        self._cfg, self._tokenizer = cfg, tokenizer
        self._words: Sequence[int] = encode_inside(tokenizer, cfg.words)

    @property
    def longest(self) -> int:
        """Tokens of a completion that has just been interrupted as late as may be."""
        return self._cfg.at + self._cfg.spread + len(self._words)

    def request(self, prompt: Prompt, samples: int, seed: int, partial: Iterable[Rollout] = ()) -> Request:
        """Return a request of these samples; `partial`: rollouts of it that were handed back, to be continued."""
        return Request(prompt, samples, seed, partial=tuple(partial), agent_loop=self._loop(prompt, seed))

    def _loop(self, prompt: Prompt, seed: int) -> AgentLoop:
        def play(completion: Completion) -> Commands:
            limit = self._cfg.at
            if self._cfg.spread:
                limit += derived_seed("interruption", seed, prompt.id, completion.sample) % (self._cfg.spread + 1)
            if (left := limit - len(completion.output_tokens)) > 0:
                reason = yield Generate(left)
                if reason == "stop" or len(completion.output_tokens) < limit:
                    return reason
            if not self._over(completion):  # holds for a resumed rollout after the words, too
                yield Observe(self._words)
            yield Generate()
            return None

        return play

    def _over(self, completion: Completion) -> bool:
        return self._cfg.until in self._tokenizer.decode(completion.output_tokens.tolist())
