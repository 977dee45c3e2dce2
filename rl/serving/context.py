"""What a server has, against which requests are checked."""

from dataclasses import dataclass

from axlearn_like.tokenizers.protocol import Tokenizer
from rl.rollout.sampling import Sampler
from rl.serving.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ServingContext:
    """The policy behind the endpoint, and what a request may ask of it.

    Attributes:
        model: the one name that requests may give.
        max_prompt: tokens.
        max_new: tokens of a completion, the default too.
        stop_tokens: end every completion.
        sampler: for what a request leaves open.
        max_samples: completions of one request, over all its prompts.
        deadline: seconds, the longest and the default.
    """

    model: str
    tokenizer: Tokenizer
    template: ChatTemplate
    max_prompt: int
    max_new: int
    stop_tokens: tuple[int, ...]
    sampler: Sampler.Config
    max_samples: int
    deadline: float
