"""Options of a start from a model and a file: those of the command line, of a YAML file and of Python.

Nothing heavy is imported: the command line reads the options from here.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.errors import UserError, did_you_mean, once
from mesh.files.bucket import BucketError, bucket_url


def _option(kind: type, text: str) -> Any:
    return dataclasses.field(default=None, metadata={"kind": kind, "help": text})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartOptions:
    """A model's directory and a file of rows; all that is None is derived."""

    model: str | Path | None = _option(
        str, "A model's directory, in Hugging Face's form, in place of EXPERIMENT: sizes are derived, and printed."
    )
    data: str | Path | None = _option(str, "With --model: a file of rows to learn from.")
    heldout: str | Path | None = _option(
        str, "With --model: a file of held-out rows; else a share of --data is held out."
    )
    columns: str | None = _option(str, "With --model: columns whose names are not known, as prompt=body,answer=gold.")
    pairs: bool | None = _option(bool, "With --model: rows have a chosen and a rejected answer; learn by DPO.")
    lora: bool | None = _option(bool, "With --model: train LoRA factors alone. [default: where not all parameters fit]")
    steps: int | None = _option(int, "With --model: updates. [default: derived from the rows]")
    save_experiment: str | None = _option(str, "With --model: write the experiment as a function to this FILE.py.")
    export: str | None = _option(str, "At the end, export the model to this directory, in Hugging Face's form.")
    reward: str | None = None  # place FILE.py:FUNCTION; None: the answer is compared with the row's. RL only
    fleet: str | None = None  # devices of the roles, as `axl rl --fleet` takes them; None: this machine's. RL only
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise UserError(f"--steps {self.steps}: expected 1 or more")

    def path(self, name: str) -> str:
        """Return the absolute path, or the URL, that an option names, such as `data`."""
        value = getattr(self, name) or ""
        return bucket_url(value) or str(Path(value).expanduser().absolute())

    def rows(self, name: str) -> str:
        """Return `path` of a file of rows, `data` or `heldout`; UserError names the option where there is none."""
        from axlearn_like.input.rows.tables import find_tables
        from axlearn_like.run.object_store import fetched_pattern

        files = self.path(name)
        try:
            find_tables(fetched_pattern(files, f"--{name}"))
        except BucketError:
            raise
        except UserError as error:
            raise UserError(f"--{name} {getattr(self, name)}: {error}") from None
        return files

    def check_export(self, run: Path, cfg: Any = None) -> None:
        """Refuse an `export` that could not be written when `run` has ended (UserError).

        With the run's config also one that is filled, unless the run has ended: its export may be the same.
        """
        if self.export is None:
            return
        from axlearn_like.run.object_store import check_new

        if (url := bucket_url(self.export)) is not None:
            check_new(url, "--export")
            return
        from models.huggingface.checkpoints.work_directory import check_free
        from models.huggingface.config_json import FILE

        target = Path(self.export).expanduser().absolute()
        if check_free(target, f"--export {self.export}", content=FILE) and not (
            run.exists() and _may_have_ended(run, cfg)
        ):
            raise UserError(f"--export {self.export}: has a model already; expected a directory that is not there yet")

    @property
    def named(self) -> dict[str, str]:
        """Columns by their part in a row, as `--columns` names them (UserError: it is no list of such)."""
        pairs = [one.partition("=") for one in (self.columns or "").split(",") if one.strip()]
        if wrong := [part + equals for part, equals, column in pairs if not (part.strip() and column.strip())]:
            raise UserError(f"--columns {self.columns}: expected PART=COLUMN,... such as prompt=body, got {wrong[0]!r}")
        return once("--columns", ((part.strip(), column.strip()) for part, _, column in pairs))

    @property
    def names(self) -> tuple[str, str]:
        """Names of the model and of the data."""
        model, data = Path(self.model or "model").expanduser().absolute(), Path(self.data or "data")
        return model.name, data.name.partition(".")[0] or "data"

    @property
    def given(self) -> list[str]:
        """Options of `--model` that are given, as on the command line."""
        own = [one.name for one in dataclasses.fields(self) if one.metadata and one.name not in ("model", "export")]
        return ["--" + name.replace("_", "-") for name in own if getattr(self, name) is not None]


def _may_have_ended(run: Path, cfg: Any) -> bool:
    """Return False if a run directory has no checkpoint of the config's last update, and none may come before it."""
    if cfg is None or getattr(cfg, "trainer", cfg).early_stopping is not None:
        return True
    from axlearn_like.checkpoint.versions import list_steps
    from axlearn_like.run.directory import RunDirectory

    folder = RunDirectory.attach(run).checkpoints
    return max([*list_steps(folder), *list_steps(folder / "rl")], default=0) >= cfg.num_steps


def read_recipe(path: str | Path, known: Mapping[str, type]) -> dict[str, Any]:
    """Return the options that a YAML file gives: a mapping of plain data, such as `model: ~/models/Qwen3-0.6B`.

    Args:
        path: the file.
        known: name of an option on the command line -> type of its value; of a tuple a list of texts is read, or a
            mapping, whose entries are texts `key=value`.

    Raises:
        UserError: the file cannot be read, or has a key or a value that does not fit; it names both.
    """
    import yaml

    try:
        found = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path}: expected a mapping of options, such as `model: DIR`, got {found!r:.60}")
    options: dict[str, Any] = {}
    for given, value in found.items():
        name = str(given).replace("_", "-")
        if name not in known:
            raise UserError(f"{path}: there is no option {given!r}{did_you_mean(name, known, limit=len(known))}")
        if known[name] is tuple and isinstance(value, dict):
            value = [f"{key}={one}" for key, one in value.items()]
        if known[name] is tuple and isinstance(value, list) and all(isinstance(one, str) for one in value):
            value = tuple(value)
        if type(value) is not known[name]:
            expected = {str: "a text", int: "a whole number", bool: "true or false", tuple: "a list of texts"}
            raise UserError(f"{path}: {given}: expected {expected[known[name]]}, got {value!r:.60}")
        options[name.replace("-", "_")] = value
    return options
