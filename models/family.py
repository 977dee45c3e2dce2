"""A family of published models: configs by the names under which they are published."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from axlearn_like.layers.decoder import Decoder
from mesh.errors import UserError, did_you_mean


class Family(NamedTuple):
    """Published models by name; a call with a name returns the model's config."""

    kind: str  # word for one of them in errors, such as "Llama model"
    models: Mapping[str, Callable[[], Decoder.Config]]  # name -> its config, a new one for each call

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models."""
        return tuple(self.models)

    def __call__(self, name: str) -> Decoder.Config:
        """Return the model of that name; activations are bfloat16, parameters float32.

        Raises:
            UserError: there is no such model; the nearest names are given.
        """
        if name not in self.models:
            raise UserError(f"no {self.kind} {name!r}{did_you_mean(name, self.models, limit=len(self.models))}")
        return self.models[name]().set(dtype="bfloat16")
