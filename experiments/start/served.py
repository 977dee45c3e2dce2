"""A model in Hugging Face's form, or an imported one, as something that a server serves; and adapters of it."""

from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.arrays import SavedParams
from axlearn_like.checkpoint.versions import split_version
from axlearn_like.config import ConfigBase, from_text, walk_configs
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.wrappers.adapters import Adapter
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from mesh.errors import UserError
from models.huggingface import hf
from models.huggingface.adapters import CONFIG
from models.huggingface.checkpoints.directory import ORIGINAL, RECORD, is_huggingface
from models.huggingface.checkpoints.importing_adapter import peft_adapter, run_adapter
from rl.serving.policy import ServedModel, find_run, newest_weights


def is_model(path: Path) -> bool:
    """Return True for a directory in Hugging Face's form, or one that an import made."""
    return (path / RECORD).is_file() or is_huggingface(path)


def served_model(path: Path, *, random_weights: bool = False) -> ServedModel.Config:
    """Return the config for a server of the directory's model, with its own tokenizer.

    Raises:
        UserError: the model cannot be built here, or has no tokenizer.
    """
    path = path.expanduser().absolute()
    files = path / ORIGINAL if (path / RECORD).is_file() else path
    policy = hf(path)
    tokenizer = HuggingFaceTokenizer.Config(path=str(files))
    cfg = ServedModel.Config(policy=policy, tokenizer=tokenizer)
    if random_weights:
        cfg.policy = Decoder.Config(**{name: getattr(policy, name) for name in Decoder.Config.__dataclass_fields__})
    most = positions(policy)
    if most is not None and cfg.max_prompt_tokens + cfg.max_new_tokens > most:
        cfg.set(max_prompt_tokens=most - most // 2, max_new_tokens=most // 2)
    return cfg


def positions(policy: ConfigBase[Any]) -> int | None:
    """Return how many positions a decoder knows; None: no limit."""
    lengths = [getattr(node, "max_length", None) for _, node in walk_configs(policy)]
    return min((length for length in lengths if isinstance(length, int)), default=None)


def read_adapter(path: Path, model: ConfigBase[Any]) -> Adapter:
    """Return the adapter of a directory in PEFT's form, or of a run with LoRA layers, for this base.

    Raises:
        UserError: it is neither, cannot be read, or was made for another base; it names the directory.
    """
    path = path.expanduser()
    if not split_version(path)[0].is_dir():
        raise UserError(f"adapter {path}: there is no such directory")
    if (path / CONFIG).is_file():
        return peft_adapter(path, model)
    run = find_run(path)
    if run is None:
        raise UserError(f"adapter {path}: expected {CONFIG} in it, as PEFT writes it, or a run directory")
    cfg = from_text(run.config_path.read_text())
    policy = next((one for one in (getattr(cfg, "policy", None), getattr(cfg, "model", None)) if one is not None), cfg)
    weights = newest_weights(run, path)
    try:
        return run_adapter(SavedParams(run.path if weights is None else weights.path), policy)
    except UserError as error:
        raise UserError(f"adapter {path}: {error}") from None
