"""Requests to the engine, and their results."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from axlearn_like.input.shuffle import derived_seed
from rl.protocol.messages import Prompt, Rollout
from rl.protocol.segments import TokenSegment
from rl.rollout.agent_loops.commands import AgentLoop, single_turn
from rl.rollout.decoding.grammar import Grammar
from rl.rollout.decoding.scores import ScoreMode, TokenScores
from rl.rollout.sampling import Sampler
from rl.rollout.scheduling.timeline import Lane

_SEEDS = 2**32
# (sample id, tokens int32 [k], log-probabilities float32 [k], their scores if the request asks for them)
OnTokens = Callable[[int, np.ndarray, np.ndarray, TokenScores | None], None]


def draw_seed(seed: int, draw: int) -> int:
    """Return the seed of a prompt that was drawn so often before: its first one, and another one each time."""
    return derived_seed("draw", seed, draw) % _SEEDS if draw else seed


@dataclasses.dataclass(frozen=True, slots=True)
class StopConditions:
    """Conditions that end a completion."""

    tokens: tuple[int, ...] = ()  # any of these ends it, and is an action of it
    strings: tuple[str, ...] = ()  # texts: a completion ends with the first token at whose end its text contains one
    max_new_tokens: int | None = None  # tokens, a stop token included; None: the engine's. 0 only to score the prompt.
    min_new_tokens: int = 0  # tokens before which neither a stop token is drawn nor a string counts


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Complete a prompt `samples` times."""

    prompt: Prompt
    samples: int = 1
    seed: int = 0  # makes, with the prompt's id, the sample's number and the position, the key of every draw
    # `sampler`, `stop`: None: the engine's
    sampler: Sampler.Config | None = None
    stop: StopConditions | None = None
    # Seconds from submission; what there is by then is returned with finish reason "deadline"
    deadline: float | None = None
    adapter: str | None = None  # name of a set of adapter weights, None for the policy itself
    # Adapters of the policies that a `Spawn` of its loops may name, by those names; None: the base. Kept to its end.
    policies: Mapping[str, str | None] = dataclasses.field(default_factory=dict[str, str | None])
    priority: int = 0  # higher goes first; among equals, the earlier one
    agent_loop: AgentLoop = single_turn  # behaviour of each sample; by default, generate once
    # Rollouts of this request to continue, as an abort returned them; other samples are not drawn, and those that ended
    # by "stop" or "length" are returned unchanged. An agent loop starts again, on these tokens.
    partial: tuple[Rollout, ...] = ()
    scores: ScoreMode | None = None  # kind of the scores of each drawn token, with alternatives; None: there are none
    # Score tokens of the prompt by the model's own distribution; none of them comes from the cache
    prompt_scores: bool = False
    grammar: Grammar | None = None  # form of each completion; None: any
    # Tokens, int32, of each sample as the same keys have drawn them under an earlier policy, as far as they are known:
    # drafts, which change no result (speculation/earlier.py)
    earlier: tuple[np.ndarray, ...] = ()
    # Segments of the prompt, in order, for an engine with `kvcomm`; (): it is one text
    segments: tuple[TokenSegment, ...] = ()

    @property
    def name(self) -> str:
        """The request's name in messages."""
        return f"prompt {self.prompt.id} ({self.prompt.family})"


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of a request."""

    number: int
    rollouts: tuple[Rollout, ...]  # one each, in order of sample id
    error: str | None = None  # cause of its end, if an error was
    scores: tuple[TokenScores | None, ...] = ()  # scores of the tokens of each rollout, if the request asked for them
    prompt_scores: TokenScores | None = None  # scores of the prompt's tokens but the first, likewise
    # Prompt (int32) and rollout of each completion that they have spawned, each followed by its own
    spawned: tuple[tuple[np.ndarray, Rollout], ...] = ()
    lanes: tuple[Lane, ...] = ()  # timeline of the first sample
