"""The architectures that can be read and written: one for each name in `config.json`'s `architectures`.

An architecture joins three things: the decoder that a `config.json` describes, the `config.json` of a decoder, and the
table of tensor names. A decoder has an architecture if its `config.json` describes the same decoder again.
"""

from collections.abc import Iterable
from typing import Any

from axlearn_like.config import config_items, text_lines, walk_configs
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.embedding import Embedding, Float32Embedding, Float32Head, Head
from axlearn_like.layers.heads import ScoreHead
from mesh.errors import did_you_mean
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson, ConfigJsonError
from models.huggingface.families import deepseek, dense, gemma, gpt2, gpt_oss, mixtures
from models.huggingface.families.heads import classifiers
from models.huggingface.rows import ConversionError
from models.huggingface.tensor_files.packed import read_packing

# Fields, and configs, that change neither a model's parameters nor the function that it computes.
_NO_EFFECT = frozenset(
    """dtype pipeline scan_unroll remat init_std kernel context_parallel product capacity_factor load_balance
    sequence_balance z_loss record_routing route_padding start_from""".split()
)
_LENGTH = "rope.max_length"  # length of RoPE; learned positions have it as a size of parameters


# A new family is added to this table.
ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for family in (dense, mixtures, gemma, gpt2, gpt_oss, deepseek)
    for architecture in family.ARCHITECTURES
}
CLASSIFIERS: dict[str, Architecture] = {one.name: one for one in classifiers(ARCHITECTURES.values())}


def find_architecture(json: ConfigJson) -> Architecture:
    """Return the architecture that a `config.json` names (ConfigJsonError: it is not known, or none is named)."""
    names = json.texts("architectures")
    if not names:
        by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES.values()}
        return json.choice("model_type", by_type)
    known = {**ARCHITECTURES, **CLASSIFIERS}
    if names[0] not in known:
        hint = did_you_mean(names[0], known, limit=len(ARCHITECTURES))
        raise ConfigJsonError(f"{json.file}: architectures: unknown architecture {names[0]!r}{hint}")
    return known[names[0]]


def read_decoder(json: ConfigJson) -> tuple[Architecture, Decoder.Config]:
    """Return the architecture and the decoder that a `config.json` describes; activations in the dtype that it says.

    Raises:
        ConfigJsonError: names the field that is wrong, or that none of our layers can compute.
    """
    architecture = find_architecture(json)
    read_packing(json)
    json.only("model_type", architecture.model_type)
    cfg = architecture.decoder(json)
    # float16 has no place in training on accelerators; bfloat16 has its speed and the range of float32.
    dtypes = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}
    cfg.set(dtype=json.choice("dtype" if "dtype" in json else "torch_dtype", dtypes, "float32"))
    cfg.check()
    return architecture.without_predictors(json, cfg.num_layers), cfg


def config_json(
    cfg: Decoder.Config, dtype: str = "float32", architecture: Architecture | None = None, **token_ids: Any
) -> dict[str, Any]:
    """Return the `config.json` of a decoder.

    Args:
        dtype: the dtype of the tensors.
        architecture: None: the one that has such decoders.
        token_ids: fields such as `eos_token_id`, which only a tokenizer knows.

    Raises:
        ConversionError: no architecture has such decoders.
    """
    architecture = architecture or architecture_for(cfg)
    fields = {**architecture.write(cfg), **token_ids, "dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    return {"architectures": [architecture.name], "model_type": architecture.model_type, **dict(sorted(fields.items()))}


def architecture_for(cfg: Decoder.Config, names: Iterable[str] = ()) -> Architecture:
    """Return the first architecture that has such decoders, of those named or of all.

    Raises:
        ConversionError: none has; for the nearest one, the fields that it has not.
    """
    wanted, nearest = _function(cfg), None
    known = CLASSIFIERS if isinstance(cfg.head, ScoreHead.Config) else ARCHITECTURES
    for architecture in [known[name] for name in names if name in known] or known.values():
        try:
            fields = {**architecture.write(cfg), "architectures": [architecture.name]}
            found = _function(architecture.decoder(ConfigJson(fields)))
        except (AttributeError, ConfigJsonError):
            continue  # blocks of another kind
        differing = [line for line in sorted(wanted.items() ^ found.items()) if line in wanted.items()]
        if wanted == found:
            return architecture
        if nearest is None or len(differing) < len(nearest[1]):
            nearest = (architecture.name, differing)
    if nearest is None:
        raise ConversionError(f"no architecture of Hugging Face has this decoder; known: {', '.join(ARCHITECTURES)}")
    lines = "; ".join(f"{path}={value}" for path, value in nearest[1][:4])
    raise ConversionError(f"no architecture of Hugging Face has this decoder; {nearest[0]} has not {lines}")


def same_function(a: Decoder.Config, b: Decoder.Config) -> bool:
    """Return True if two decoders have the same parameters and compute the same: kernels and the like may differ."""
    return _function(a) == _function(b)


def _function(cfg: Decoder.Config) -> dict[str, str]:
    """Return the lines of a config that say what is computed; defaults that other fields say are filled in."""
    cfg = cfg.clone()
    if isinstance(cfg.head, Float32Head.Config):  # rounds less, as a model of another dtype does
        cfg.head = Head.Config(**dict(config_items(cfg.head)))
    if isinstance(cfg.embedding, Float32Embedding.Config):
        cfg.embedding = Embedding.Config(**dict(config_items(cfg.embedding)))
    for _, node in walk_configs(cfg):
        if isinstance(node, Attention.Config):
            dim = node.dim if isinstance(node.dim, int) else cfg.dim
            node.set(num_kv_heads=node.num_kv_heads or node.num_heads, head_dim=node.head_dim or dim // node.num_heads)
    return {
        path: value
        for path, value in text_lines(cfg).items()
        if path and value != "REQUIRED" and not _NO_EFFECT & set(path.split(".")) and not path.endswith(_LENGTH)
    }
