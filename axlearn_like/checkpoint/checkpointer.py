"""Checkpoints by Orbax: asynchronous, atomic, resharded on restore, verified by checksum.

Orbax detects a truncated or missing file but silently loads a flipped bit, so each save also records shape, dtype and a
checksum of every array, and a digest of the extras; a restore compares them. Frozen parameters are written once (see
frozen.py).
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, override

from axlearn_like.checkpoint import reader
from axlearn_like.checkpoint.interval import SAVE_EVERY, SaveInterval
from axlearn_like.checkpoint.manifest import make_manifest
from axlearn_like.checkpoint.versions import CheckpointError
from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.layers.parameter_names import only, without
from axlearn_like.run.disk import DiskFull, is_full_disk, quieten_full_disk
from mesh.errors import UserError


class Checkpointer(Configurable):
    """Checkpoints of a state (a dict of trees with the key "params") and JSON-able extras in one directory.

    What the state has under "constant" is written when it changes; other checkpoints link the files.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from axlearn_like.checkpoint.checkpointer import Checkpointer
    >>> checkpointer = Checkpointer.Config(keep=2).build(directory="checkpoints")
    >>> state = {"params": {"w": jnp.arange(3.0)}, "step": jnp.array(3)}
    >>> for step in (1, 2, 3):
    ...     checkpointer.save(step, state, {"tokens": 100 * step})
    >>> checkpointer.wait()
    >>> checkpointer.steps()
    [2, 3]
    >>> restored, extras = checkpointer.restore(jax.eval_shape(lambda: state))
    >>> restored["params"]["w"].tolist(), extras["tokens"]
    ([0.0, 1.0, 2.0], 300)
    >>> checkpointer.close()
    """

    class Config(ConfigBase["Checkpointer"]):
        save_every: int | None = None  # steps between saves; None: 100, or fewer by the failures of the run
        keep: int = 3  # newest checkpoints kept
        asynchronous: bool = True  # write in the background while training goes on

        @override
        def check_fields(self) -> None:
            self.require_least(1, "save_every", "keep")

    def __init__(self, cfg: Config, *, directory: str | Path):
        self._cfg = cfg
        self.directory = Path(directory).absolute()
        self._manager: Any = None
        self.every = cfg.save_every or SAVE_EVERY  # steps between saves
        self.frozen: Collection[str] = ()  # paths of the parameters that no update changes
        self.held: Any = None  # frozen parameters themselves, if they are there: `restore` then reads none of them
        self.beside: Sequence[Path] = ()  # directories of other runs, whose files of the same arrays are linked

    def should_save(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step` completed updates."""
        return step > 0 and (step % (self._cfg.save_every or SAVE_EVERY) == 0 or step % self.every == 0)

    def choose(self, interval: SaveInterval | None) -> bool:
        """Save as often as an interval says, too, unless the config sets it; returns True if that is more often."""
        if interval is not None and self._cfg.save_every is None and interval.steps < self.every:
            self.every = interval.steps
            return True
        return False

    def save(self, step: int, state: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        """Start to write a checkpoint; the arrays may be donated as soon as this returns.

        A step that is already on disk is left as it is: the same run and step, so the same content.

        Raises:
            CheckpointError: this save, or an earlier one in the background, failed. DiskFull: there is no room.
        """
        import orbax.checkpoint as ocp

        self.check()
        manager = self._open((reader.CONSTANT,) if reader.CONSTANT in state else ())
        if step in manager.all_steps():
            return
        rest = {key: value for key, value in state.items() if key not in ("params", reader.CONSTANT)}
        params = without(state["params"], self.frozen)
        manifest = {
            reader.PARAMS: make_manifest(params),
            reader.REST: make_manifest(rest),
            reader.EXTRAS: {"json": {"digest": reader.digest_of(extras)}},
        }
        arguments = {
            reader.PARAMS: ocp.args.StandardSave(params),  # pyright: ignore
            reader.REST: ocp.args.StandardSave(rest),  # pyright: ignore
            reader.MANIFEST: ocp.args.JsonSave(manifest),  # pyright: ignore
            reader.EXTRAS: ocp.args.JsonSave(dict(extras)),  # pyright: ignore
        }
        linked = {reader.CONSTANT: state[reader.CONSTANT]} if reader.CONSTANT in state else {}
        if self.frozen:
            linked[reader.FROZEN] = only(state["params"], self.frozen)
        written = False
        if linked:
            from axlearn_like.checkpoint.frozen import FrozenArgs

            self.wait()  # Orbax would wait too: only one save is under way
            for item, arrays in linked.items():
                manifest[item] = make_manifest(arrays)
                files = self._written(item, manifest[item])
                arguments[item], written = FrozenArgs(arrays, files), written or files is None
        items = ocp.args.Composite(**arguments)
        try:
            manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._write_error(error) from error
        if written and self.beside:
            self.wait()  # the others find its files, and so write none

    def restore(
        self, abstract_state: Mapping[str, Any], step: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read (state, extras) of `step`, or of the latest one.

        Args:
            abstract_state: `jax.ShapeDtypeStruct`s like the state; the arrays get their shardings (on real devices,
                of any mesh).

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
        except reader.Damaged as error:
            load = partial(self._load, abstract=abstract_state)
            raise reader.damage_error(self.directory, step, error, load) from None

    def steps(self) -> list[int]:
        """Return the steps of completed checkpoints, oldest first."""
        return reader.list_steps(self.directory)

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

    def _written(self, item: str, manifest: Any) -> Path | None:
        """Return the folder of the same arrays in a newest complete step, if one has them."""
        for folder in (self.directory, *self.beside):
            for step in reader.list_steps(folder)[-1:]:
                if reader.manifest_of(folder / str(step), item) == manifest:
                    return folder / str(step) / item
        return None

    def _open(self, others: tuple[str, ...]) -> Any:
        if self._manager is None:
            import orbax.checkpoint as ocp

            quieten_full_disk()
            _count_no_bytes()
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
                    item_names=(
                        *(reader.PARAMS, reader.REST, reader.MANIFEST, reader.EXTRAS),
                        *((reader.FROZEN,) if self.frozen else ()),
                        *others,
                    ),
                )
            except OSError as error:
                raise self._write_error(error) from error
        return self._manager

    def _load(self, step: int, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        whole = ("params", reader.CONSTANT)
        rest = {key: value for key, value in abstract.items() if key not in whole}
        constant = {key: abstract[key] for key in whole[1:] if key in abstract}
        path = self.directory / str(step)
        params = abstract["params"] if self.held is None else without(abstract["params"], self.frozen)
        items = reader.read_items(path, {reader.PARAMS: params, reader.REST: rest, **constant}, held=self.held)
        state = {"params": items[reader.PARAMS], **items[reader.REST], **{key: items[key] for key in constant}}
        return state, items[reader.EXTRAS]

    def _write_error(self, error: BaseException) -> UserError:
        if is_full_disk(error):
            return DiskFull(str(self.directory))
        return CheckpointError(f"could not write a checkpoint to {self.directory}: {reader.summary(error)}")


def _count_no_bytes() -> None:
    """Let Orbax find no figures of TensorStore's, which nobody reads.

    TensorStore never frees what it lists for them: 4.5 kB a call, and 60 a checkpoint of a tiny model (0.1.86).
    """
    import tensorstore

    def no_metrics(*_: object, **__: object) -> list[dict[str, Any]]:
        return []

    tensorstore.experimental_collect_matching_metrics = no_metrics


def _listed(steps: list[int]) -> str:
    return "steps " + ", ".join(map(str, steps)) if steps else "none"
