"""A `config.json` whose fields are read by name, type and meaning: what our layers cannot compute is refused."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from mesh.errors import UserError, did_you_mean
from mesh.files.bounded import read_json

FILE = "config.json"
_NONE = object()
_LARGEST = (1 << 31) - 1
# Far more than any model has, few enough to be made one by one before the files are looked at.
_MOST_LAYERS, _MOST = 2_000, 16_384

# Fields that say nothing about the function that the network computes, or that other files say again.
_NO_EFFECT = frozenset(
    """_attn_implementation _attn_implementation_autoset _name_or_path architectures
    attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id hidden_dropout id2label initializer_range is_decoder is_encoder_decoder
    label2id length_penalty max_length max_position_embeddings min_length model_type no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty
    resid_pdrop return_dict return_dict_in_generate router_jitter_noise sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p use_bfloat16 use_cache""".split()
)


class ConfigJsonError(UserError):
    """A `config.json` of a model that our layers cannot compute; the message names file, field, expected and found."""


class ConfigJson:
    """The fields of one `config.json`; each that is read is marked, so that those that nobody read can be listed."""

    def __init__(self, values: Mapping[str, Any], file: str = FILE):
        self.file = file
        self.defaults: Mapping[str, Any] = {}  # defaults of absent fields; null is not absent
        self._values = dict(values)
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file. ConfigJsonError: there is none, or it is not a JSON object."""
        try:
            values = read_json(path)
        except FileNotFoundError:
            raise ConfigJsonError(f"{path}: there is no such file; it says which model the tensors are of") from None
        except OSError as error:
            raise ConfigJsonError(f"{path}: cannot be read ({error.strerror or error})") from None
        except ValueError as error:
            raise ConfigJsonError(f"{path}: expected JSON, {error}") from None
        if not isinstance(values, dict):
            raise ConfigJsonError(f"{path}: expected a JSON object, got {type(values).__name__}")
        return cls(values, str(path))

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, default: Any = _NONE, *, least: int = 1, most: int = _LARGEST) -> Any:
        """Return an integer from `least` to `most`; where the field is null, or absent without a default, `default`."""
        value = self._typed(name, default, "an integer", lambda value: type(value) is int)
        if name in self and not least <= value <= most:
            raise self.error(name, f"an integer from {least:,} to {most:,}", f"{value}")
        return value

    def count(self, name: str, default: Any = _NONE, *, least: int = 1) -> Any:
        """Return a number of things that are made one by one, such as experts, or the frequencies of a head."""
        value = self.integer(name, default, least=least, most=_MOST)
        if value is not None and value > _MOST:  # a default that is made of other fields
            raise self.error(name, f"an integer from {least:,} to {_MOST:,}", f"{value:,} by default")
        return value

    def layers(self, name: str, default: Any = _NONE, *, least: int = 1) -> Any:
        """Return a number of layers."""
        return self.integer(name, default, least=least, most=_MOST_LAYERS)

    def number(self, name: str, default: Any = _NONE, *, positive: bool = False) -> Any:
        """Return a finite number from 0 on, or above it, as a float; see `integer` for `default`."""
        kind = "a number above 0" if positive else "a number from 0 on"
        value = self._typed(name, default, kind, lambda value: _is_number(value, positive))
        return float(value) if type(value) is int else value

    def flag(self, name: str, default: Any = _NONE) -> bool:
        """Return a boolean."""
        return self._typed(name, default, "true or false", lambda value: type(value) is bool)

    def text(self, name: str, default: Any = _NONE) -> Any:
        """Return a string."""
        return self._typed(name, default, "a string", lambda value: isinstance(value, str))

    def array(self, name: str, default: Any = _NONE) -> Any:
        """Return a list."""
        return self._typed(name, default, "a list", lambda value: isinstance(value, list))

    def texts(self, name: str) -> list[str]:
        """Return a list of strings, empty where the field is absent or null."""
        fits = lambda value: isinstance(value, list) and all(isinstance(entry, str) for entry in value)  # noqa: E731
        return self._typed(name, [], "a list of strings", fits)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of finite numbers above 0."""
        fits = lambda value: isinstance(value, list) and all(_is_number(one, True) for one in value)  # noqa: E731
        return tuple(map(float, self._typed(name, _NONE, "a list of numbers above 0", fits)))

    def size(self, name: str, default: int) -> int:
        """Return the number of entries of an object; where the field is absent or null, the default."""
        return len(self._typed(name, [None] * default, "an object", lambda value: isinstance(value, dict)))

    def nested(self, name: str) -> "ConfigJson | None":
        """Return an object within the file, None where it is absent or null."""
        if name not in self:
            self._read.add(name)
            return None
        value = self._typed(name, None, "an object", lambda value: isinstance(value, dict))
        return ConfigJson(value, f"{self.file}: {name}")

    def choice[T](self, name: str, known: Mapping[Any, T], default: Any = _NONE) -> T:
        """Return what a value stands for; others are refused, with the nearest known."""
        value = self._typed(name, default, "a value", lambda value: True)
        if not isinstance(value, (str, int, float, bool, type(None))) or value not in known:
            hint = did_you_mean(value, [str(key) for key in known]) if isinstance(value, str) else ""
            raise self.error(name, " or ".join(map(repr, known)), f"{value!r}, which none of our layers computes{hint}")
        return known[value]

    def either(self, *names: str) -> str:
        """Return the name of several that the file has, or else transformers' defaults; all are known then."""
        self._read.update(names)
        return next((name for known in (self._values, self.defaults) for name in names if name in known), names[0])

    def only(self, name: str, *supported: Any) -> None:
        """Refuse a field whose value is not among those that are supported; one that is absent is not."""
        value = self._values.get(name)
        self._read.add(name)
        if value is not None and value not in supported:
            raise self.error(name, " or ".join(map(repr, supported)), f"{value!r}, which none of our layers computes")

    def ignore(self, *names: str) -> None:
        """Mark fields as known that have no effect on this architecture."""
        self._read.update(names)

    def unread(self) -> list[str]:
        """Return the fields that nobody read, without those that are empty, zero or false."""
        return [name for name, value in self._values.items() if value and name not in self._read | _NO_EFFECT]

    def error(self, name: str, expected: str, found: str) -> ConfigJsonError:
        """Return the error of a field."""
        return ConfigJsonError(f"{self.file}: {name}: expected {expected}, got {found}")

    def _typed(self, name: str, default: Any, kind: str, fits: Callable[[Any], bool]) -> Any:
        self._read.add(name)
        value = self._values.get(name, self.defaults.get(name))
        if value is None:
            if default is _NONE:
                raise self.error(name, kind, "nothing")
            return default
        if not fits(value):
            raise self.error(name, kind, f"{value!r}")
        return value


def _is_number(value: Any, positive: bool) -> bool:
    """Return True for a finite number above 0, or 0 unless it is to be positive."""
    return type(value) in (int, float) and math.isfinite(value) and (value > 0 or value == 0 and not positive)
