"""Requests to the engine, and their results."""

import dataclasses
from collections.abc import Callable

import numpy as np

from axlearn_like.input.shuffle import derived_seed
from rl.protocol.messages import Prompt, Rollout
from rl.rollout.agent_loops.commands import AgentLoop, single_turn
from rl.rollout.decoding.grammar import Grammar
from rl.rollout.decoding.scores import ScoreMode, TokenScores
from rl.rollout.sampling import Sampler

_SEEDS = 2**32
# (sample id, tokens int32 [k], log-probabilities float32 [k], their scores if the request asks for them)
OnTokens = Callable[[int, np.ndarray, np.ndarray, TokenScores | None], None]


def draw_seed(seed: int, draw: int) -> int:
    """Return the seed of a prompt that was drawn so often before: its first one, and another one each time."""
    return derived_seed("draw", seed, draw) % _SEEDS if draw else seed


@dataclasses.dataclass(frozen=True, slots=True)
class StopConditions:
    """Conditions that end a completion.

    Attributes:
        tokens: any of these ends it, and is an action of it.
        strings: it ends with the first token at whose end its text contains one of these.
        max_new_tokens: tokens, a stop token included; None: the engine's. 0 only to score the prompt.
        min_new_tokens: tokens before which neither a stop token is drawn nor a string counts.
    """

    tokens: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    min_new_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Complete a prompt `samples` times.

    Attributes:
        seed: with the prompt's id, the sample's number and the position it makes the key of every draw.
        sampler, stop: None: the engine's.
        deadline: seconds from submission; what there is by then is returned with finish reason "deadline".
        adapter: name of a set of adapter weights, None for the policy itself.
        priority: higher goes first; among equals, the earlier one.
        agent_loop: what each sample does; by default, generate once.
        partial: rollouts of this request to continue, as an abort returned them; other samples are not drawn, and those
            that ended by "stop" or "length" are returned unchanged. An agent loop starts again, on these tokens.
        scores: kind of the scores of each drawn token, with alternatives; None: there are none.
        prompt_scores: score tokens of the prompt by the model's own distribution; none of them comes from the cache.
        grammar: form of each completion; None: any.
        earlier: tokens, int32, of each sample as the same keys have drawn them under an earlier policy, as far as they
            are known: drafts, which change no result (speculation/earlier.py).
    """

    prompt: Prompt
    samples: int = 1
    seed: int = 0
    sampler: Sampler.Config | None = None
    stop: StopConditions | None = None
    deadline: float | None = None
    adapter: str | None = None
    priority: int = 0
    agent_loop: AgentLoop = single_turn
    partial: tuple[Rollout, ...] = ()
    scores: ScoreMode | None = None
    prompt_scores: bool = False
    grammar: Grammar | None = None
    earlier: tuple[np.ndarray, ...] = ()

    @property
    def name(self) -> str:
        """The request's name in messages."""
        return f"prompt {self.prompt.id} ({self.prompt.family})"


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of a request.

    Attributes:
        rollouts: in order of sample id.
        error: what ended it, if an error did.
        scores: scores of the tokens of each rollout, if the request asked for them.
        prompt_scores: scores of the prompt's tokens but the first, likewise.
        spawned: prompt (int32) and rollout of each completion that they have spawned, each followed by its own.
    """

    number: int
    rollouts: tuple[Rollout, ...]
    error: str | None = None
    scores: tuple[TokenScores | None, ...] = ()
    prompt_scores: TokenScores | None = None
    spawned: tuple[tuple[np.ndarray, Rollout], ...] = ()
