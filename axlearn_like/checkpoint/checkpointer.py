"""Checkpoints by Orbax: asynchronous, atomic, resharded on restore, verified by checksum.

Orbax detects a truncated or missing file but silently loads a flipped bit, so each save also records shape, dtype and a
checksum of every array, and a digest of the extras; a restore compares them.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from axlearn_like.checkpoint.manifest import CheckpointError, abstract_from, check_structure, make_manifest
from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.run.disk import DiskFull, is_full_disk, quieten_full_disk
from mesh.errors import UserError

# One checkpoint holds these items; parameters apart, so that another run can load them alone.
_PARAMS, _REST, _MANIFEST, _EXTRAS = "params", "rest", "manifest", "extras"


class Checkpointer(Configurable):
    """Checkpoints of a state (a dict of trees with the key "params") and JSON-able extras in one directory."""

    class Config(ConfigBase["Checkpointer"]):
        save_every: int = 100  # steps between saves
        keep: int = 3  # newest checkpoints kept
        asynchronous: bool = True  # write in the background while training goes on

    def __init__(self, cfg: Config, *, directory: str | Path):
        if cfg.save_every < 1 or cfg.keep < 1:
            raise UserError(
                "Checkpointer.Config: expected save_every >= 1 and keep >= 1, "
                f"got save_every={cfg.save_every}, keep={cfg.keep}"
            )
        self._cfg = cfg
        self.directory = Path(directory).absolute()
        self._manager: Any = None

    def should_save(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step` completed updates."""
        return step > 0 and step % self._cfg.save_every == 0

    def save(self, step: int, state: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        """Start to write a checkpoint; the arrays may be donated as soon as this returns.

        A step that is already on disk is left as it is: the same run and step, so the same content.

        Raises:
            CheckpointError: this save, or an earlier one in the background, failed. DiskFull: there is no room.
        """
        import orbax.checkpoint as ocp

        self.check()
        manager = self._open()
        if step in manager.all_steps():
            return
        rest = {key: value for key, value in state.items() if key != "params"}
        manifest = {
            _PARAMS: make_manifest(state["params"]),
            _REST: make_manifest(rest),
            _EXTRAS: {"json": {"digest": _digest(extras)}},
        }
        items = ocp.args.Composite(
            **{
                _PARAMS: ocp.args.StandardSave(state["params"]),  # pyright: ignore
                _REST: ocp.args.StandardSave(rest),  # pyright: ignore
                _MANIFEST: ocp.args.JsonSave(manifest),  # pyright: ignore
                _EXTRAS: ocp.args.JsonSave(dict(extras)),  # pyright: ignore
            }
        )
        try:
            manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._write_error(error) from error

    def restore(
        self, abstract_state: Mapping[str, Any], step: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read (state, extras) of `step`, or of the latest one.

        Args:
            abstract_state: `jax.ShapeDtypeStruct`s like the state; the arrays get their shardings (on real devices,
                of any mesh).
            step: a completed step.

        Raises:
            CheckpointError: there is none, it cannot be read, is damaged, or is of a state of another shape.
        """
        self.wait()
        steps = self.steps()
        step = (steps[-1] if steps else None) if step is None else step
        if step is None or step not in steps:
            raise CheckpointError(
                f"{self.directory} has no checkpoint{'' if step is None else f' of step {step}'}; "
                f"there are {_listed(steps)}"
            )
        try:
            return self._load(step, abstract_state)
        except _Damaged as error:
            load = partial(self._load, abstract=abstract_state)
            raise _damage(self.directory, step, error, load) from None

    def steps(self) -> list[int]:
        """Return the steps of completed checkpoints, oldest first."""
        return _steps(self.directory)

    def latest_step(self) -> int | None:
        """Return the step of the newest completed checkpoint."""
        steps = self.steps()
        return steps[-1] if steps else None

    def check(self) -> None:
        """Raise CheckpointError if a save in the background has failed."""
        if self._manager is not None:
            try:
                self._manager.check_for_errors()
            except Exception as error:
                raise self._write_error(error) from error

    def wait(self) -> None:
        """Wait until nothing is being written; raise CheckpointError if a save failed."""
        if self._manager is not None:
            try:
                self._manager.wait_until_finished()
            except Exception as error:
                raise self._write_error(error) from error

    def close(self) -> None:
        """Wait, then end the background threads."""
        if self._manager is not None:
            try:
                self.wait()
            finally:
                manager, self._manager = self._manager, None
                manager.close()

    def _open(self) -> Any:
        if self._manager is None:
            import orbax.checkpoint as ocp

            quieten_full_disk()
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._cfg.keep,
                enable_async_checkpointing=self._cfg.asynchronous,
                # Where no directory can be made, fail at once: Orbax's background threads would
                # wait five minutes for one and keep the process from ending.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                cleanup_tmp_directories=True,
            )
            try:
                self._manager = ocp.CheckpointManager(
                    self.directory,
                    options=options,
                    item_names=(_PARAMS, _REST, _MANIFEST, _EXTRAS),
                )
            except OSError as error:
                raise self._write_error(error) from error
        return self._manager

    def _load(self, step: int, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        rest = {key: value for key, value in abstract.items() if key != "params"}
        path = self.directory / str(step)
        items = _read(path, {_PARAMS: abstract["params"], _REST: rest})
        return {"params": items[_PARAMS], **items[_REST]}, items[_EXTRAS]

    def _write_error(self, error: BaseException) -> UserError:
        if is_full_disk(error):
            return DiskFull(str(self.directory))
        return CheckpointError(f"could not write a checkpoint to {self.directory}: {_summary(error)}")


def restore_params(path: str | Path, abstract_params: Any = None) -> Any:
    """Read the parameters alone of any run's checkpoint.

    Args:
        path: a run directory or its `checkpoints` directory (the latest step is taken), or one
            step's directory.
        abstract_params: `jax.ShapeDtypeStruct`s with shardings. Without them the result is a nested
            dict of numpy arrays.

    Raises:
        CheckpointError: nothing there, unreadable, damaged, or of another shape.
    """
    folder = _step_directory(Path(path).absolute())
    try:
        if abstract_params is None:
            abstract_params = abstract_from(_read_manifest(folder)[_PARAMS])
        return _read(folder, {_PARAMS: abstract_params})[_PARAMS]
    except _Damaged as error:
        raise CheckpointError(f"checkpoint {folder} is damaged ({error})") from None


def check_params(path: str | Path, abstract_params: Any) -> None:
    """Refuse what `restore_params` would refuse, by the manifest alone; no array is read."""
    folder = _step_directory(Path(path).absolute())
    try:
        check_structure(f"checkpoint {folder}", abstract_params, _read_manifest(folder)[_PARAMS])
    except _Damaged as error:
        raise CheckpointError(f"checkpoint {folder} is damaged ({error})") from None


def verify_latest(directory: str | Path) -> None:
    """Read the newest checkpoint in a `checkpoints` directory, if there is one, and compare it with its manifest.

    Raises:
        CheckpointError: it cannot be read, or is damaged; names the newest older one that is good.
    """
    directory = Path(directory).absolute()
    for step in _steps(directory)[-1:]:
        try:
            _verify(directory / str(step))
        except _Damaged as error:
            raise _damage(directory, step, error, lambda s: _verify(directory / str(s))) from None


class _Damaged(Exception):
    """The content on disk is not what was written."""


_UNREADABLE = ("PERMISSION_DENIED", "Permission denied", "Input/output error", "Too many open files", "UNAVAILABLE")


def _failure(path: Path, error: BaseException) -> Exception:
    """Return the error of a failed read: damage, unless the operating system refused to read.

    Then the content may be good, and advice to delete it would be wrong. TensorStore says so only in its message.
    """
    cause: BaseException | None = error
    while cause is not None:
        refused = isinstance(cause, OSError) and not isinstance(cause, (FileNotFoundError, NotADirectoryError))
        # A path that this process cannot spell: Python's filesystem encoding is not UTF-8.
        encoding = isinstance(cause, UnicodeError) and sys.getfilesystemencoding().lower() not in ("utf-8", "utf8")
        if refused or encoding or any(words in str(cause) for words in _UNREADABLE):
            hint = "set PYTHONUTF8=1" if encoding else "check permissions, disk and mounts"
            return CheckpointError(
                f"checkpoint {path} cannot be read ({_summary(cause)}); that does not mean damage: keep it, "
                f"{hint}, and run the same command again"
            )
        cause = cause.__cause__ or cause.__context__
    return _Damaged(_summary(error))


def _damage(directory: Path, step: int, error: _Damaged, load: Callable[[int], Any]) -> CheckpointError:
    """Return the error of a damaged checkpoint; it names the newest of the older ones that `load` accepts."""
    path = directory / str(step)
    advice = f"no older one is good. Delete {path} to begin again"
    for older in reversed([s for s in _steps(directory) if s < step]):
        try:
            load(older)
        except (CheckpointError, _Damaged):
            continue
        advice = f"the nearest older good step is {older}. Delete {path} to go on from there"
        break
    return CheckpointError(f"checkpoint {path} is damaged ({error}); {advice}")


def _verify(path: Path) -> None:
    """Read every array to host memory, in the tree that Orbax has recorded."""
    import orbax.checkpoint as ocp

    manifest = _read_manifest(path)
    try:
        arrays = {item: ocp.StandardCheckpointHandler() for item in (_PARAMS, _REST)}
        texts = {item: ocp.JsonCheckpointHandler() for item in (_MANIFEST, _EXTRAS)}
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**arrays, **texts)) as reader:  # pyright: ignore
            recorded = reader.metadata(path).item_metadata[_REST]
        rest = jax.tree.map(lambda array: np.empty(array.shape, array.dtype), getattr(recorded, "tree", recorded))
    except Exception as error:
        raise _failure(path, error) from None
    _read(path, {_PARAMS: abstract_from(manifest[_PARAMS]), _REST: rest})


def _read(path: Path, abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Read the items of `abstract` and the extras, verified against the manifest."""
    import orbax.checkpoint as ocp

    manifest = _read_manifest(path)
    for item, tree in abstract.items():
        check_structure(f"checkpoint {path}", tree, manifest[item])
    args = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}  # pyright: ignore
    args[_EXTRAS] = ocp.args.JsonRestore()  # pyright: ignore
    items: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            items = dict(reader.restore(path, args=ocp.args.Composite(**args)).items())
    except Exception as error:
        failure = _failure(path, error)
    if failure is not None:
        _drop_unfinished_reads()
        raise failure
    if _digest(items[_EXTRAS]) != manifest[_EXTRAS]["json"]["digest"]:
        raise _Damaged(f"the content of {path / _EXTRAS} does not match its digest")
    for item in abstract:
        for name, entry in make_manifest(items[item]).items():
            if entry["checksum"] != manifest[item][name]["checksum"]:
                raise _Damaged(f"the content of {name!r} does not match its checksum")
    return items


def _read_manifest(path: Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            manifest = reader.restore(path / _MANIFEST)
    except Exception as error:
        raise _failure(path, error) from None
    if not {_PARAMS, _REST, _EXTRAS} <= set(manifest):
        raise _Damaged(f"{path / _MANIFEST} lists no arrays")
    return manifest


def _step_directory(path: Path) -> Path:
    try:
        if (path / _PARAMS).is_dir():
            return path
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read ({_summary(error)})") from error
    steps = _steps(folder)
    if not steps:
        raise CheckpointError(
            f"{path} holds no checkpoint; expected a run directory, its checkpoints directory, or one step in it"
        )
    return folder / str(steps[-1])


def _steps(directory: Path) -> list[int]:
    """Return the steps of completed checkpoints, oldest first."""
    try:
        return sorted(int(entry.name) for entry in os.scandir(directory) if entry.name.isdigit() and entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoints {directory} cannot be listed ({_summary(error)})") from error


def _digest(extras: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(extras, sort_keys=True).encode())


def _listed(steps: list[int]) -> str:
    return "steps " + ", ".join(map(str, steps)) if steps else "none"


def _drop_unfinished_reads() -> None:
    """Collect the reads that Orbax abandons when one fails.

    Python prints a screen for each of them when it is collected, which would bury the one error that matters.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook


def _summary(error: BaseException) -> str:
    """Return the first sentence: TensorStore's messages are a screen long."""
    text = str(error).strip().split("\n", 1)[0].split(". ", 1)[0]
    return f"{type(error).__name__}: {text[:200]}"
