"""A decoder that begins with parameters of its own, wherever it is trained or served."""

from typing import Any

from axlearn_like.config import REQUIRED, ConfigBase, config_items
from axlearn_like.layers.decoder import Decoder


class Pretrained(Decoder):
    """A decoder whose config says where its first parameters are: trainers and servers read them there."""

    class Config(Decoder.Config):
        start_from: ConfigBase = REQUIRED  # StartFrom.Config

    @classmethod
    def of(cls, decoder: Decoder.Config, start_from: ConfigBase[Any]) -> "Pretrained.Config":
        """Return the config of a decoder together with the source of its parameters."""
        return cls.Config(**dict(config_items(decoder.clone())), start_from=start_from)


def pretrained_source(model: ConfigBase[Any]) -> Any:
    """Return the config of the source of a model's first parameters, None where it has none of its own."""
    return model.start_from if isinstance(model, Pretrained.Config) else None
