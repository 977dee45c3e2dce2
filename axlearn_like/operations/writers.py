"""Writers of metrics besides `metrics.jsonl`, when a config names them: TensorBoard, Weights & Biases, Trackio.

They show the config as fields, alarms, and tables of answers that the run keeps for people to read.
"""

import time
import uuid
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, recorded_values
from axlearn_like.run.jsonl import JsonlTail
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


class RunTexts:
    """Texts of a run directory that are no metrics: the config, and since the last look answers and alarms."""

    columns = ("phase", "step", "family", "question", "answer", "expected", "reward")

    def __init__(self, run_dir: Path, answers: bool):
        """`answers`: False: prompts and answers are never read."""
        self._config, samples = run_dir / "config.txt", ("eval_before", "rl", "eval_after") if answers else ()
        self._events = JsonlTail(run_dir / "events.jsonl", from_end=True)
        self._samples = [JsonlTail(run_dir / "rollouts" / f"{name}.jsonl", from_end=True) for name in samples]

    def config(self) -> dict[str, Any]:
        """Return the plain values of the config by their paths, and its text."""
        text = self._config.read_text() if self._config.exists() else ""
        return {**recorded_values(text), "config": text}

    def answers(self) -> list[list[Any]]:
        """Return new answers, in `columns`."""
        rows = [row for tail in self._samples for row in tail.new_rows()]
        return [[row.get(name) for name in self.columns] for row in rows]

    def alarms(self) -> list[str]:
        """Return new alarms."""
        return [row["text"] for row in self._events.new_rows() if row.get("event") == "alarm"]


class TensorBoard(Configurable):
    """Event files in `tensorboard/` of the run directory, by tensorboardX."""

    class Config(ConfigBase["TensorBoard"]):
        answers: bool = True  # tables of prompts and answers

    def __init__(self, cfg: Config, *, run_dir: Path, resume_step: int):
        """Open the event files; rows beyond `resume_step` that an earlier process wrote are marked as replaced."""
        library, self._texts = _imported("tensorboardX", "tensorboard", "TensorBoard"), RunTexts(run_dir, cfg.answers)
        folder = run_dir / "tensorboard"
        purge = {"purge_step": resume_step + 1} if folder.exists() else {}
        # Its files are named by the second: a process restarted at once would overwrite its predecessor's.
        self._writer = library.SummaryWriter(str(folder), filename_suffix=f".{time.time_ns()}", **purge)
        plain = {name: v if isinstance(v, int | float) else str(v) for name, v in self._texts.config().items()}
        for summary in import_module("tensorboardX.summary").hparams(plain, {}):
            self._writer.file_writer.add_summary(summary)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the scalars as PHASE/NAME."""
        for name, value in _scalars(row).items():
            self._writer.add_scalar(f"{row['phase']}/{name}", value, row["step"], walltime=row["time"])
        for text in self._texts.alarms():
            self._writer.add_text("alarms", text, row["step"])
        if answers := self._texts.answers():
            lines = [RunTexts.columns, ["---"] * len(RunTexts.columns), *answers]
            cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in line] for line in lines]
            self._writer.add_text("answers", "\n".join(f"| {' | '.join(line)} |" for line in cells), row["step"])

    def close(self) -> None:
        """Close the event files."""
        self._writer.close()


class WeightsAndBiases(Configurable):
    """A run of a project at wandb.ai, or as WANDB_MODE and WANDB_BASE_URL say; resumed with the run."""

    class Config(ConfigBase["WeightsAndBiases"]):
        project: str = REQUIRED
        entity: str | None = None  # team of the project; None: the account's own
        name: str | None = None  # name of the run; None: the run directory's
        answers: bool = True  # prompts and answers are sent there, as tables

        def reaches(self) -> tuple[str, ...]:
            """Return the account that is named here; the user's own needs no consent."""
            own = self.entity is None and "/" not in str(self.project)
            return () if own else (f"wandb:{self.entity}/{self.project}",)

    def __init__(self, cfg: Config, *, run_dir: Path, resume_step: int):
        del resume_step  # first row of a step is kept
        self._library, self._texts = _imported("wandb", "wandb", "WeightsAndBiases"), RunTexts(run_dir, cfg.answers)
        identity = run_dir / "wandb_id"
        if not identity.exists():
            replace_file(identity, uuid.uuid4().hex[:16])
        kept = {"id": identity.read_text(), "entity": cfg.entity, "dir": str(run_dir)}
        self._start(cfg.project, cfg.name or run_dir.name, kept)

    def _start(self, project: str, name: str, options: Mapping[str, Any]) -> None:
        config = self._texts.config()
        self._run = self._library.init(project=project, name=name, config=config, resume="allow", **options)

    def write(self, row: Mapping[str, Any]) -> None:
        """Log the scalars as PHASE/NAME, new answers as a table, and new alarms."""
        values: dict[str, Any] = {f"{row['phase']}/{name}": value for name, value in _scalars(row).items()}
        if answers := self._texts.answers():
            values["answers"] = self._library.Table(columns=list(RunTexts.columns), data=answers)
        self._run.log(values, step=row["step"])
        for text in self._texts.alarms():
            self._run.alert(title=text.partition(":")[0], text=text)

    def close(self) -> None:
        """Finish the run there."""
        self._run.finish()


class Trackio(WeightsAndBiases):
    """A run of a project of Trackio, on this machine or as TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say."""

    class Config(ConfigBase["Trackio"]):
        project: str = REQUIRED
        name: str | None = None  # name of the run; None: the run directory's
        answers: bool = True  # tables of prompts and answers

    def __init__(self, cfg: Config, *, run_dir: Path, resume_step: int):
        self._library, self._texts = _imported("trackio", "trackio", "Trackio"), RunTexts(run_dir, cfg.answers)
        self._start(cfg.project, cfg.name or run_dir.name, {"embed": False})


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
