"""A model in Hugging Face's form, or an imported one, as something that `axl serve` serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.experiment import apply_edits

if TYPE_CHECKING:
    from rl.serving.model import ServedModel


def is_model(path: Path) -> bool:
    """Return True for a directory in Hugging Face's form, or one that an import made."""
    from models.huggingface.checkpoints.directory import is_huggingface
    from models.huggingface.checkpoints.importing import RECORD

    return (path / RECORD).is_file() or is_huggingface(path)


def served_model(path: Path, sets: Sequence[str], random_weights: bool) -> ServedModel.Config:
    """Return the config for a server of the directory's model, with its own tokenizer, after edits.

    Raises:
        UserError: the model cannot be built here, its tokenizer is missing, or the files are not the model's.
    """
    from axlearn_like.layers.decoder import Decoder
    from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
    from models.huggingface import hf
    from models.huggingface.checkpoints.importing import ORIGINAL, RECORD
    from rl.serving.model import ServedModel

    path = path.absolute()
    files = path / ORIGINAL if (path / RECORD).is_file() else path
    cfg = ServedModel.Config(policy=hf(path), tokenizer=HuggingFaceTokenizer.Config(path=str(files)))
    positions = _positions(cfg)
    if positions is not None and cfg.max_prompt + cfg.max_new > positions:
        cfg.set(max_prompt=positions - positions // 2, max_new=positions // 2)
    apply_edits(cfg, sets)
    if random_weights:
        policy = cfg.policy
        assert isinstance(policy, Decoder.Config)
        cfg.policy = Decoder.Config(**{name: getattr(policy, name) for name in Decoder.Config.__dataclass_fields__})
    cfg.check()
    return cfg


def _positions(cfg: ServedModel.Config) -> int | None:
    """Return the positions that the policy was made for, if it says so."""
    from axlearn_like.config import walk_configs

    lengths = [getattr(node, "max_length", None) for _, node in walk_configs(cfg.policy)]
    return min((length for length in lengths if isinstance(length, int)), default=None)
