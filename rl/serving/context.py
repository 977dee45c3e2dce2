"""The serving context: the policy's properties and the server's limits, against which requests are checked."""

from dataclasses import dataclass

from axlearn_like.tokenizers.protocol import Tokenizer
from rl.rollout.decoding.grammar import Grammars
from rl.rollout.sampling import Sampler
from rl.serving.adapters import ServedAdapters
from rl.serving.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ServingContext:
    """The policy behind the endpoint, and the limits of a request."""

    models: ServedAdapters  # the names that requests may give: the base's, and those of adapters, which come and go
    tokenizer: Tokenizer
    template: ChatTemplate
    max_prompt_tokens: int
    max_new_tokens: int  # tokens of a completion; also the default
    stop_tokens: tuple[int, ...]  # end every completion
    sampler: Sampler.Config  # defaults of a request's sampling parameters
    max_samples: int  # completions of one request, over all its prompts
    deadline: float  # seconds; also the default
    grammars: Grammars  # reader of the forms that answers may have
