"""A model in Hugging Face's form, or an imported one, as something that a server serves."""

from pathlib import Path

from axlearn_like.config import walk_configs
from axlearn_like.layers.decoder import Decoder
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from models.huggingface import hf
from models.huggingface.checkpoints.directory import is_huggingface
from models.huggingface.checkpoints.importing import ORIGINAL, RECORD
from rl.serving.model import ServedModel


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
    lengths = [getattr(node, "max_length", None) for _, node in walk_configs(policy)]
    positions = min((length for length in lengths if isinstance(length, int)), default=None)
    if positions is not None and cfg.max_prompt + cfg.max_new > positions:
        cfg.set(max_prompt=positions - positions // 2, max_new=positions // 2)
    return cfg
