"""Writers of metrics besides `metrics.jsonl`: TensorBoard and Weights & Biases, when a config names them."""

import time
import uuid
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from mesh.errors import UserError, install_hint
from mesh.files.written import replace_file


class Writer(Protocol):
    """Receiver of metrics rows; built by `config.build(run_dir=..., resume_step=...)`."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row as it stands in metrics.jsonl: `phase`, `step`, `time` and scalars."""
        ...

    def close(self) -> None:
        """Write what is buffered."""
        ...


class TensorBoard(Configurable):
    """Event files in `tensorboard/` of the run directory, by tensorboardX."""

    class Config(ConfigBase["TensorBoard"]):
        pass

    def __init__(self, cfg: Config, *, run_dir: Path, resume_step: int):
        """Open the event files; rows beyond `resume_step` that an earlier process wrote are marked as replaced."""
        del cfg
        library = _imported("tensorboardX", "tensorboard", "TensorBoard")
        folder = run_dir / "tensorboard"
        purge = {"purge_step": resume_step + 1} if folder.exists() else {}
        # Its files are named by the second: a process restarted at once would overwrite its predecessor's.
        self._writer = library.SummaryWriter(str(folder), filename_suffix=f".{time.time_ns()}", **purge)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the scalars as PHASE/NAME."""
        for name, value in _scalars(row).items():
            self._writer.add_scalar(f"{row['phase']}/{name}", value, row["step"], walltime=row["time"])

    def close(self) -> None:
        """Close the event files."""
        self._writer.close()


class WeightsAndBiases(Configurable):
    """A run of a project at wandb.ai, or as WANDB_MODE and WANDB_BASE_URL say; resumed with the run."""

    class Config(ConfigBase["WeightsAndBiases"]):
        project: str = REQUIRED
        entity: str | None = None  # team of the project; None: the account's own
        name: str | None = None  # name of the run; None: the run directory's

        def reaches(self) -> tuple[str, ...]:
            """Return the account that is named here; the user's own needs no consent."""
            own = self.entity is None and "/" not in str(self.project)
            return () if own else (f"wandb:{self.entity}/{self.project}",)

    def __init__(self, cfg: Config, *, run_dir: Path, resume_step: int):
        del resume_step  # first row of a step is kept
        library = _imported("wandb", "wandb", "WeightsAndBiases")
        identity = run_dir / "wandb_id"
        if not identity.exists():
            replace_file(identity, uuid.uuid4().hex[:16])
        config = run_dir / "config.txt"
        self._run = library.init(
            project=cfg.project,
            entity=cfg.entity,
            name=cfg.name or run_dir.name,
            id=identity.read_text(),
            resume="allow",
            dir=str(run_dir),
            config={"config": config.read_text() if config.exists() else ""},
        )

    def write(self, row: Mapping[str, Any]) -> None:
        """Log the scalars as PHASE/NAME."""
        self._run.log({f"{row['phase']}/{name}": value for name, value in _scalars(row).items()}, step=row["step"])

    def close(self) -> None:
        """Finish the run there."""
        self._run.finish()


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in row.items() if name not in ("phase", "step", "time")}
    return {name: value for name, value in numbers.items() if isinstance(value, (int, float))}


def _imported(module: str, extra: str, who: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(
            f"the metrics writer {who} needs {module}, which is not installed; {install_hint(extra)}"
        ) from None
