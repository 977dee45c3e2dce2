"""Messages between roles: small frozen records of plain values and numpy arrays.

The *behaviour contract*: a rollout carries, for each token, its id, whether it is an action of the policy, its
log-probability under exactly the distribution it was sampled from, and the policy version that sampled it.
A *version* is the number of completed updates. Masks come from positions, never from token ids.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

# "watch": the watch of its last draw has ended it. The last three never reach training.
FinishReason = Literal["stop", "length", "watch", "abort", "deadline", "error"]
WHOLE: tuple[FinishReason, ...] = ("stop", "length", "watch")  # ends of a rollout that is all there
ScoreStatus = Literal["ok", "timeout", "crash", "error"]
EpisodeEnd = Literal["done", "truncated", "error"]


# Details of a rollout that a scorer may want beside its answer: some of "tokens" (ids) and "finish_reason".
Details = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One instance of a task: the question, and the record that its scorer needs."""

    id: int  # unique in the run and stable; the same id is the same problem on every machine
    family: str
    question: str
    answer: str
    entry: dict[str, Any]  # the task package's own record of the instance, or the row of a table
    # The conversation to answer, of which `question` is the text; None: the question is all of it
    messages: tuple[Mapping[str, Any], ...] | None = None
    # Descriptions of tools that the chat template shows, by JSON schema; None: there are none
    tools: tuple[Mapping[str, Any], ...] | None = None
    asked_by_environment: bool = False  # the prompt is only the first token of a chat; its environment gives the rest


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens that the policy continues; `id` is that of the problem."""

    id: int
    family: str
    tokens: np.ndarray  # int32 [prompt length]
    draw: int = 0  # earlier drawings, for other steps: its samples have other keys each time


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One action of the policy in an episode, and what the environment gave for it."""

    end: int  # tokens of the completion up to the end of the action
    reward: float  # a finite number
    # Messages since the action before, as role and content; not those of the prompt
    given: tuple[Mapping[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Episode:
    """Record of a rollout in an environment: its turns, and how it ended."""

    turns: tuple[Turn, ...] = ()
    answer: str | None = None  # the text that the verifier judges; None: the turns' rewards are all
    # "done" by the environment; "truncated" at the limit of turns or tokens, without a verdict; "error", of the
    # environment: the rollout has no reward
    ended: EpisodeEnd = "done"
    error: str = ""
    figures: tuple[tuple[str, float], ...] = ()  # named numbers for the metrics, such as tool calls and their seconds


@dataclasses.dataclass(frozen=True, slots=True)
class TreeNode:
    """The place of a rollout that a sample has spawned: trained on beside it, and no sample of its prompt."""

    sample: int  # sample id of the rollout of the group that it belongs to
    number: int  # number of the node in that one's plan
    reward: float | None = None  # reward of its own; None: that of the sample


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of a prompt. Arrays of tokens have the completion's length; a sampled stop token is included.

    Tokens that were given and not sampled (the answer of a tool) have action_mask False and log-probability 0.
    """

    prompt_id: int
    sample_id: int
    tokens: np.ndarray  # int32
    logprobs: np.ndarray  # float32, under the distribution that each was sampled from
    versions: np.ndarray  # int32
    action_mask: np.ndarray  # bool
    finish_reason: FinishReason
    tags: tuple[str, ...] = ()  # approximations in use when it was sampled
    # Experts of each token that the policy was fed (prompt and completion without the last), if recorded: [tokens,
    # layers with experts, top_k] in the smallest unsigned type. Fewer tokens where the completion ends with tokens that
    # were given: nothing follows from those.
    routing: np.ndarray | None = None
    # Tokens that each was drawn from, with a `RecordedSampler` (`packed_candidates`)
    candidate_tokens: np.ndarray | None = None
    episode: Episode | None = None  # episode of a problem with an environment
    demonstration: bool = False  # given and not drawn: its log-probabilities are 0, of nobody's distribution
    node: TreeNode | None = None  # None: a sample of the prompt

    @property
    def is_sample(self) -> bool:
        """True for the policy's own answer to the prompt: no demonstration, and no node of another one's plan."""
        return not self.demonstration and self.node is None

    @property
    def drawn(self) -> np.ndarray:
        """Actions with a log-probability, bool [tokens]; a demonstration has none."""
        return np.zeros_like(self.action_mask) if self.demonstration else self.action_mask


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """A verifier's verdict. Anything but status "ok" is a failure of the verifier, and its reward is 0."""

    reward: float  # a finite number
    status: ScoreStatus = "ok"
    seconds: float = 0.0
    error: str = ""  # fault, if the status is not "ok"
    terms: tuple[tuple[str, float], ...] = ()  # the named numbers that the reward is made of, if it has any


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt with their scores. A batch consists of whole groups."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    # Class of the hardware that drew them (`mesh.devices.hardware_class`), all of which has the same bits; "" where
    # bits depend on the batch
    hardware: str = ""

    def drawn_rewards(self) -> list[float]:
        """Return the rewards of the policy's own rollouts, as far as they could be scored."""
        pairs = zip(self.rollouts, self.scores, strict=True)
        return [score.reward for rollout, score in pairs if score.status == "ok" and rollout.is_sample]


# Groups of a batch by their indices: the tokens of the prompt, and rollouts by theirs.
RolloutData = Mapping[int, tuple[np.ndarray, Mapping[int, Rollout]]]


def contents_of(groups: Sequence[Group], wanted: Mapping[int, Sequence[int]] | None = None) -> RolloutData:
    """Return prompts and rollouts of groups: those wanted (group -> rollouts), or all."""
    if wanted is None:
        wanted = {g: range(len(group.rollouts)) for g, group in enumerate(groups)}
    return {g: (groups[g].prompt.tokens, {n: groups[g].rollouts[n] for n in chosen}) for g, chosen in wanted.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Seat:
    """The policy and version that draw the tokens of a role of an episode."""

    role: str
    policy: str  # name of the policy; "": the base
    version: int
    incarnation: int
    learns: bool = True  # the policy is trained on the tokens; of others the version is frozen


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """The right, until `seconds` from its grant, to generate `samples` rollouts for each prompt."""

    id: int
    step: int  # the update that will consume the rollouts; of an evaluation, its version
    prompts: tuple[Prompt, ...]
    samples: int
    version: int  # the weights to generate with
    seconds: float
    follow: bool = False  # the worker loads newer weights while it generates
    # Rollouts of these prompts to continue, handed back by a worker that had to leave: for each prompt all samples or
    # none. Those that ended by "stop" or "length" are complete.
    partial: tuple[Rollout, ...] = ()
    # Number that changes whenever the trainer starts again: weights pulled before may have been computed again, and
    # the same version may have other bits
    incarnation: int = 0
    evaluation: bool = False  # the prompts are held-out problems, whose rollouts are scored and not trained on
    rerun: bool = False  # the prompts may have been generated before, and that was lost: environments may have seen it
    policy: str = ""  # name of the policy that draws them, where an experiment has several; "": its only one
    # Tokens of each sample by prompt, as the same keys have drawn them under another version, as far as they
    # are known: drafts, which change no result
    earlier: tuple[tuple[np.ndarray, ...], ...] = ()
    # Prompt id -> its samples, which were drawn before and are drawn again to be compared; empty: all samples of all
    # prompts, for an update or an evaluation
    again: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict[int, tuple[int, ...]])
    # Policy that draws each role, where the prompts begin episodes of several; empty: one draws all
    seats: tuple[Seat, ...] = ()
    # Leases of other policies that were granted with it, as a rule for the other roles of the same episodes
    beside: tuple["Lease", ...] = ()

    def samples_of(self, prompt: Prompt) -> Sequence[int]:
        """Return the ids of the samples to draw of a prompt."""
        return self.again[prompt.id] if self.again else range(self.samples)


@dataclasses.dataclass(slots=True)
class PullStats:
    """Statistics of one pull, in bytes."""

    needed: int = 0  # bytes of index ranges that the devices need and that were not here, each counted once
    read: int = 0  # decoded bytes requested; equal to `needed` if nothing was requested twice
    network: int = 0  # encoded bytes over sockets
    mapped: int = 0  # used in shared memory
    source: str = "server"  # "server", or "worker" if a peer served it
    seconds: float = 0.0  # time from the publication (or the call, if that was later) to the arrays on the devices
    checksum: str = ""  # checksum of the version's contents
