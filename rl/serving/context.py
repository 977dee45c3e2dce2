"""The serving context: the policy's properties and the server's limits, against which requests are checked."""

from dataclasses import dataclass

from axlearn_like.tokenizers.protocol import Tokenizer
from rl.rollout.decoding.grammar import Grammars
from rl.rollout.sampling import Sampler
from rl.serving.adapters import ServedAdapters
from rl.serving.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ServingContext:
    """The policy behind the endpoint, and the limits of a request.

    Attributes:
        models: the names that requests may give: the base's, and those of adapters, which come and go.
        max_new_tokens: tokens of a completion; also the default.
        stop_tokens: end every completion.
        sampler: defaults of a request's sampling parameters.
        max_samples: completions of one request, over all its prompts.
        deadline: seconds; also the default.
        grammars: reader of the forms that answers may have.
    """

    models: ServedAdapters
    tokenizer: Tokenizer
    template: ChatTemplate
    max_prompt_tokens: int
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    sampler: Sampler.Config
    max_samples: int
    deadline: float
    grammars: Grammars
