"""The form of an architecture: its `config.json`, both ways, and its table of tensor names."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from axlearn_like.layers.block_pattern import segment_layers
from axlearn_like.layers.decoder import Decoder
from models.huggingface.config_json import ConfigJson
from models.huggingface.rows import Row, Section

# Model type -> field -> what transformers takes where config.json leaves it out (tests/golden/reference/defaults.py).
DEFAULTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))
ROOT: Mapping[str, Row] = {
    "embedding.weight_vd": Row("model.embed_tokens.weight", "v,d"),
    "norm.scale": Row("model.norm.weight", "d"),
    "head.weight_dv": Row("lm_head.weight", "v,d"),
}


@dataclass(frozen=True)
class Architecture:
    """One architecture."""

    name: str  # the entry of `architectures` in `config.json`, such as "LlamaForCausalLM"
    model_type: str  # the field of `config.json`, such as "llama"
    # The decoder that a `config.json` with transformers' defaults describes (`decoder`); refuses what our layers cannot
    # compute
    read: Callable[[ConfigJson], Decoder.Config]
    # The fields of a decoder's `config.json` without `architectures`, `model_type` and `dtype`. It need not check that
    # the decoder is one of this architecture, but may fail (an AttributeError) where it is not.
    write: Callable[[Decoder.Config], dict[str, Any]]
    rows: Mapping[str, Row]  # the table of tensor names of a block: path in it -> tensor
    root: Mapping[str, Row] = field(default_factory=lambda: ROOT)  # table of what is outside of blocks
    # Tensors that files may hold as copies of others where the config ties them: name -> original
    copies: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    vocabulary: tuple[str, ...] = ("model.embed_tokens.weight", "lm_head.weight")  # tensors with a row for each token
    # Prefix of the tensors' names that older files, saved without the head, lack: GPT-2's on the Hub. "": no file lacks
    # it.
    base_prefix: str = ""
    # Axes of a row's tensor -> those that it has where it is held as 4-bit numbers (MXFP4)
    packed: Mapping[str, str] = field(default_factory=dict[str, str])
    # Patterns (`fnmatch`) of names of tensors that hold nothing, such as tables of rotations
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    # Names of the field of `config.json` that counts layers behind the model's own, which predict further tokens and
    # are left out; (): there is none
    predictors: tuple[str, ...] = ()

    def decoder(self, config: ConfigJson) -> Decoder.Config:
        """Return the decoder that a `config.json` describes, where a field that it leaves out is as in transformers.

        Raises:
            ConfigJsonError: names the field that is wrong, or that none of our layers can compute.
        """
        config.defaults = DEFAULTS[self.model_type]
        return self.read(config)

    def sections(self, cfg: Decoder.Config) -> tuple[Section, ...]:
        """Return the tables of a decoder: the root's, and one for each stack of blocks."""
        stacks = segment_layers(cfg.block, cfg.num_layers)
        return Section("", self.root), *(Section(f"{name}.", self.rows, tuple(where)) for name, where in stacks.items())

    def without_predictors(self, config: ConfigJson, layers: int) -> "Architecture":
        """Return the architecture that ignores the tensors of the layers behind the model's own that a file counts."""
        more = config.layers(config.either(*self.predictors), 0, least=0) if self.predictors else 0
        names = tuple(f"model.layers.{index}.*" for index in range(layers, layers + more))
        return replace(self, ignored=(*self.ignored, *names)) if names else self

    def full_name(self, name: str) -> str:
        """Return the name of a tensor with the prefix that it lacks."""
        return name if name.startswith(self.base_prefix) or name in self.copies else f"{self.base_prefix}{name}"

    def may_have(self, name: str, names: Collection[str]) -> bool:
        """Return True for a tensor that is no parameter but that files may hold: a copy of one, or an ignored one."""
        return self.copies.get(name) in names or any(fnmatchcase(name, pattern) for pattern in self.ignored)
