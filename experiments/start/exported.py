"""The weights of a run as a directory in Hugging Face's form: what `axl convert export` writes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.arrays import SavedParams
from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.config import ConfigBase, from_text, walk_configs
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.run.directory import RunDirectory
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from axlearn_like.tokenizers.jinja_template import JinjaTemplate
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError, did_you_mean
from models.huggingface.checkpoints.directory import RECORD
from models.huggingface.checkpoints.exporting import Entries, Exported, ExportedTokenizer, Original, export_checkpoint
from models.huggingface.checkpoints.exporting_adapter import export_adapter
from models.huggingface.checkpoints.merged import MergedParams
from rl.runtime.policies.changes import refuse_several
from rl.serving.policy import find_run, newest_weights


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """A decoder with the parameters of a run, of one step of it, or of an import."""

    cfg: ConfigBase[Any]  # config of the run
    decoder: Decoder.Config  # decoder of the run, maybe with adapters
    params: Entries  # the parameters
    base: Path | None  # directory of the model that the run began with, if it was in Hugging Face's form, or imported

    @classmethod
    def find(cls, source: Path) -> "SavedModel":
        """Return that of RUN (its newest weights), RUN@best, RUN@STEP, a checkpoint's path, or an import.

        Raises:
            UserError: there is no such run, or it has no decoder.
        """
        run = find_run(source)
        if run is None:
            forms = "RUN, RUN@best, RUN@STEP or a checkpoint's path"
            beside = [] if source.exists() else [file.parent.name for file in source.parent.glob("*/config.txt")]
            near = did_you_mean(source.name, beside)
            raise UserError(f"{source}: expected {forms}, got none: it has no config.txt{near}")
        cfg = from_text(run.read_config())
        weights = newest_weights(run, source)
        if weights is None:
            refuse_several(run.path)
        path = run.path if weights is None else weights.path
        return cls(cfg, _decoder(cfg, run), SavedParams(path), _origin(cfg, run))

    @property
    def adapted(self) -> bool:
        """True if layers have adapters."""
        return plain_config(self.decoder) != self.decoder

    def export(
        self,
        target: Path,
        *,
        card: str | None = None,
        dtype: str | None = None,
        max_shard_size: int = 5 * 10**9,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Exported:
        """Write a plain model, adapters added to its matrices (see `export_checkpoint`).

        The tokenizer and the other files of a model that was imported are given back; else those of the run's
        tokenizer. `card` is the text of README.md.
        """
        return export_checkpoint(
            MergedParams(self.params, self.decoder) if self.adapted else self.params,
            plain_config(self.decoder),
            target,
            original=Original.of(self.base)._replace(card=card),
            dtype=dtype,
            max_shard_size=max_shard_size,
            tokenizer=_tokenizer(self.cfg),
            progress=progress,
        )

    def export_adapter(self, target: Path) -> tuple[int, bool]:
        """Write the adapter alone, in PEFT's form; return its bytes, and whether it was there before."""
        return export_adapter(self.params, self.decoder, target, "" if self.base is None else str(self.base))


def _decoder(cfg: ConfigBase[Any], run: RunDirectory) -> Decoder.Config:
    """Return the decoder of a directory's config: an imported one's, a trainer's model, an experiment's policy."""
    for found in (cfg, getattr(cfg, "policy", None), getattr(cfg, "model", None)):
        if isinstance(found, Decoder.Config):
            return found
    raise UserError(f"{run.path}: expected a run of a decoder, got {run.read_config().partition(chr(10))[0]}")


def _origin(cfg: ConfigBase[Any], run: RunDirectory) -> Path | None:
    """Return the directory of the model that a run began with, if it was in Hugging Face's form, or imported."""
    starts = [Path(node.path) for _, node in walk_configs(cfg) if isinstance(node, StartFrom.Config)]
    for path in (run.path, *starts):
        imported = find_run(path)
        if imported is not None and (imported.path / RECORD).is_file():
            return imported.path
        if imported is None and path.is_dir():
            return path
    return None


def _tokenizer(cfg: ConfigBase[Any]) -> ExportedTokenizer:
    """Return what an export needs of an experiment's tokenizer."""
    found = (getattr(node, "tokenizer", None) for _, node in walk_configs(cfg))
    tokenizer = next((each for each in found if isinstance(each, ConfigBase)), None)
    if tokenizer is None:
        return ExportedTokenizer()
    built: Tokenizer = tokenizer.build()
    ends = built.stop_ids
    ids = {"bos_token_id": built.bos, "eos_token_id": ends[0] if len(ends) == 1 else list(ends)}
    fields = {name: i for name, i in ids.items() if i is not None}
    if not isinstance(tokenizer, HuggingFaceTokenizer.Config):
        return ExportedTokenizer(ids=fields)
    own = JinjaTemplate.read(tokenizer.chat_template, {}).source if tokenizer.chat_template else None
    return ExportedTokenizer(tokenizer.path, fields, own)
