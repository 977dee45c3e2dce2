"""Sizes and defaults of a rollout engine."""

from axlearn_like.config import REQUIRED, ConfigBase
from mesh import UserError
from rl.rollout.sampling import Sampler


class EngineConfig[T](ConfigBase[T]):
    """Fields of `RolloutEngine.Config`. They stand here for the files that the engine is made of."""

    model: ConfigBase = REQUIRED
    stop_tokens: tuple[int, ...] = REQUIRED  # empty: every completion has full length
    max_prompt: int = REQUIRED  # tokens
    max_new: int = REQUIRED  # tokens, the stop token included
    max_num_seqs: int = 64  # sequences that draw tokens at the same time
    page_size: int = 16  # tokens; divides 64
    pages: int | None = None  # None: enough for `max_num_seqs` sequences of full length
    steps_per_dispatch: int = 32  # tokens that each sequence draws before the host looks at them
    prefill_tokens: int = 512  # in all rows of a prefill dispatch
    prefills_per_iteration: int = 4  # dispatches, while other sequences are drawing
    keep_prefixes: bool = True  # cache prompts for requests that begin alike, until the weights change
    keep_completions: bool = True  # cache completions too, for conversations that continue
    max_queue: int | None = None  # unfinished requests; more are refused
    mesh: dict[str, int] = {}  # {}: one device; {"tensor": n}: n devices
    sampler: Sampler.Config = Sampler.Config()

    @property
    def longest(self) -> int:
        """Tokens that a sequence can have."""
        return self.max_prompt + self.max_new

    @property
    def pool_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return 1 + self.max_num_seqs * -(-self.longest // self.page_size) if self.pages is None else self.pages

    def check(self) -> None:
        """Refuse sizes that no engine can have.

        Raises:
            UserError: naming the field.
        """
        for name in ("max_prompt", "max_new", "max_num_seqs", "steps_per_dispatch", "prefills_per_iteration"):
            if getattr(self, name) < 1:
                raise UserError(f"RolloutEngine.{name} is {getattr(self, name)}; expected 1 or more")
        if self.max_queue is not None and self.max_queue < 1:
            raise UserError(f"RolloutEngine.max_queue is {self.max_queue}; expected 1 or more, or None for no limit")
        if self.page_size < 1 or 64 % self.page_size:
            raise UserError(f"RolloutEngine.page_size is {self.page_size}; expected a divisor of 64")
        if self.prefill_tokens < 64:
            raise UserError(f"RolloutEngine.prefill_tokens is {self.prefill_tokens}; expected 64 or more")
