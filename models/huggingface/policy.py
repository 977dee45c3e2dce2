"""Models in Hugging Face's form as the policy, or the beginning, of an experiment."""

from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.pretrained import Pretrained
from axlearn_like.config import from_text
from axlearn_like.layers.decoder import Decoder
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.object_store import fetched
from mesh.files.bucket import bucket_url
from models.huggingface.architectures import read_decoder
from models.huggingface.checkpoints.directory import RECORD
from models.huggingface.checkpoints.source import HuggingFaceReader, ImportedReader
from models.huggingface.config_json import FILE, ConfigJson
from models.huggingface.rows import ConversionError


def hf(path: str | Path, **fields: Any) -> Pretrained.Config:
    """Return the model of a directory as a config: the decoder that it describes, which begins with its parameters.

    Only `config.json` is read now; the parameters are read by the processes that train or serve.

    Args:
        path: a directory in Hugging Face's form, or one that `axl convert import` made.
        fields: fields of the decoder to change, such as `remat`.

    Raises:
        UserError: there is no such directory, or it is of a model that our layers do not compute.
    """
    folder = _described(path)
    if (folder / RECORD).is_file():
        decoder = from_text(RunDirectory.attach(folder).read_config())
        if not isinstance(decoder, Decoder.Config):
            raise ConversionError(
                f"{folder}: expected the config of a decoder, got one of {type(decoder).__qualname__}"
            )
    else:
        if not folder.is_dir():
            raise ConversionError(f"{folder}: there is no such directory; expected one with {FILE}")
        decoder = read_decoder(ConfigJson.load(folder / FILE))[1]
    return Pretrained.of(decoder.set(**fields), hf_weights(path))


def hf_weights(path: str | Path, conversions: tuple[Any, ...] = ()) -> StartFrom.Config:
    """Return the source of a directory's parameters for `start_from`, for a model that another config describes.

    Args:
        path: a directory as for `hf`.
        conversions: steps from the directory's model to the one that is wanted, such as `WrapPlain` for LoRA.
    """
    folder = _described(path)
    reader = ImportedReader.Config() if (folder / RECORD).is_file() else HuggingFaceReader.Config()
    return StartFrom.Config(path=bucket_url(path) or str(folder), reader=reader, conversions=conversions)


def _described(path: str | Path) -> Path:
    """Return the directory; of one in a bucket a copy of what describes the model, without its weights."""
    return fetched(path, "path", only=lambda name: name.endswith((".json", ".txt"))).absolute()
