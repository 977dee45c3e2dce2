"""Reading of checkpoints, verified by their manifests; `damage` tells a damaged one from one that cannot be read."""

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from axlearn_like.checkpoint.damage import (
    EXTRAS,
    MANIFEST,
    check_entries,
    check_files,
    check_sizes,
    check_stores,
    digest_of,
    find_damage,
)
from axlearn_like.checkpoint.manifest import abstract_from, check_structure, make_manifest
from axlearn_like.checkpoint.plain.plain_arrays import CorruptError, read_plain
from axlearn_like.checkpoint.versions import PARAMS, CheckpointError, find_version, list_steps
from axlearn_like.layers.parameter_names import merged, only, path_name, without
from mesh.files.bounded import read_json

# One checkpoint holds these items; parameters apart, so that another run can load them alone.
REST = "rest"  # beside PARAMS, MANIFEST and EXTRAS
FROZEN = "frozen"  # parameters that no update changes, if there are any
CHUNKS = "chunks"  # key of the manifest: digests of the files that an import wrote
_UNDER_WAY = 0.5  # seconds within which abandoned reads end
CONSTANT = "constant"  # other arrays that stay as they are from one checkpoint to the next, if there are any


def restore_params(path: str | Path, abstract_params: Any = None) -> Any:
    """Read the parameters alone of any run's checkpoint.

    Args:
        path: a name of saved weights, see `versions`.
        abstract_params: `jax.ShapeDtypeStruct`s with shardings. Without them the result is a nested
            dict of numpy arrays.

    Raises:
        CheckpointError: nothing there, unreadable, damaged, or of another shape.
    """
    folder = find_version(path).path
    held = check_files(folder)  # a stranger may have made them
    with _telling_damage(folder):
        manifest = params_of(read_manifest(folder))
        check_sizes(folder, manifest, held)
        if abstract_params is None:
            abstract_params = abstract_from(manifest)
        found = _plain_params(folder, abstract_params)
        return read_items(folder, {PARAMS: abstract_params})[PARAMS] if found is None else found


def saved_manifest(path: str | Path) -> Mapping[str, Any]:
    """Return the manifest of the parameters that `restore_params` would read. CheckpointError: there are none."""
    folder = find_version(path).path
    with _telling_damage(folder):
        return read_manifest(folder)[PARAMS]


def check_params(path: str | Path, abstract_params: Any) -> None:
    """Refuse what `restore_params` would refuse, by the manifest alone; no array is read."""
    folder = find_version(path).path
    with _telling_damage(folder):
        check_structure(f"checkpoint {folder}", abstract_params, params_of(read_manifest(folder)))


def verify_latest(directory: str | Path) -> None:
    """Read the newest checkpoint in a `checkpoints` directory, if there is one, and compare it with its manifest.

    Raises:
        CheckpointError: it cannot be read, or is damaged; names the newest older one that is good.
    """
    directory = Path(directory).absolute()
    for step in list_steps(directory)[-1:]:
        try:
            _verify(directory / str(step))
        except Damaged as error:
            raise damage_error(directory, step, error, lambda s: _verify(directory / str(s))) from None


class Damaged(Exception):
    """The content on disk is not what was written."""


@contextlib.contextmanager
def _telling_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except Damaged as error:
        raise CheckpointError(f"checkpoint {folder} is damaged ({error})") from None


def _failure(path: Path, error: Exception) -> Exception:
    """Return the error of a failed read: `Damaged` if the bytes say so, else what it is, with advice to keep it."""
    try:
        if (why := find_damage(path)) is not None:
            return Damaged(why)
        state = "its files are as they were written"
    except Exception:  # no verdict, and so no damage; the first error says more
        state = "that does not mean damage"
    encoding = isinstance(error, UnicodeError) and sys.getfilesystemencoding().lower() not in ("utf-8", "utf8")
    hint = "set PYTHONUTF8=1" if encoding else "check permissions, disk, memory and devices"
    failure = CheckpointError(
        f"checkpoint {path} cannot be read ({summary(error)}); {state}: keep it, {hint}, and run the same command again"
    )
    failure.__cause__ = error
    return failure


def damage_error(directory: Path, step: int, error: Damaged, load: Callable[[int], Any]) -> CheckpointError:
    """Return the error of a damaged checkpoint; it names the newest of the older ones that `load` accepts."""
    path = directory / str(step)
    advice = f"no older one is good. Move {path} away to begin again"
    for older in reversed([s for s in list_steps(directory) if s < step]):
        try:
            load(older)
        except (CheckpointError, Damaged):
            continue
        advice = f"the nearest older good step is {older}. Move {path} away to go on from there"
        break
    return CheckpointError(f"checkpoint {path} is damaged ({error}); {advice}")


def _verify(path: Path) -> None:
    try:
        why = find_damage(path)
    except Exception as error:
        raise _failure(path, error) from error
    if why is not None:
        raise Damaged(why)


def read_items(path: Path, abstract: Mapping[str, Any], *, held: Any = None) -> dict[str, Any]:
    """Read the items of `abstract` and the extras, verified against the manifest; frozen parameters are in PARAMS.

    `held`: the frozen parameters, if they are there already. PARAMS of `abstract` lack them, and they are not read.
    """
    import orbax.checkpoint as ocp

    manifest = read_manifest(path)
    if held is not None and make_manifest(held) != manifest.get(FROZEN, {}):
        raise CheckpointError(f"checkpoint {path} is of another base: its frozen parameters are not those of this run")
    for item, tree in abstract.items():
        recorded = params_of(manifest) if item == PARAMS and held is None else manifest.get(item, {})
        check_structure(f"checkpoint {path}", tree, recorded)
    if PARAMS in abstract and FROZEN in manifest and held is None:
        params = abstract[PARAMS]
        parts = {PARAMS: without(params, manifest[FROZEN]), FROZEN: only(params, manifest[FROZEN])}
        abstract = {**abstract, **parts}
    args = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}  # pyright: ignore
    args[EXTRAS] = ocp.args.JsonRestore()  # pyright: ignore
    items: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        for item in abstract.keys() & {PARAMS, FROZEN}:
            check_stores(path / item, manifest[item])
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            items = dict(reader.restore(path, args=ocp.args.Composite(**args)).items())
    except Exception as error:
        failure = _failure(path, error)
    if failure is not None:
        _drop_unfinished_reads()
        raise failure
    if digest_of(items[EXTRAS]) != manifest[EXTRAS]["json"]["digest"]:
        raise _failure(path, ValueError(f"the content of {path / EXTRAS} does not match its digest"))
    for item in abstract:
        _compare(path, items[item], manifest[item])
    if FROZEN in items:
        items[PARAMS] = merged(items[PARAMS], items.pop(FROZEN))
    if held is not None:
        items[PARAMS] = merged(held, items[PARAMS])
    return items


def _plain_params(path: Path, abstract: Any) -> Any:
    """Return the parameters of a checkpoint of plain chunks, verified; None: they are stored in Orbax's usual way."""
    manifest = read_manifest(path)
    if FROZEN in manifest or (path / PARAMS / "manifest.ocdbt").exists():
        return None
    check_structure(f"checkpoint {path}", abstract, manifest[PARAMS])
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    try:
        found = read_plain(path / PARAMS, {path_name(keys): leaf for keys, leaf in leaves}, manifest.get(CHUNKS))
    except CorruptError as error:
        raise Damaged(str(error)) from None
    except Exception as error:
        raise _failure(path, error) from error
    if found is None:
        return None
    params = jax.tree.unflatten(tree, list(found.arrays.values()))
    if not found.verified:
        _compare(path, params, manifest[PARAMS])
    return params


def _compare(path: Path, items: Any, manifest: Mapping[str, Any]) -> None:
    for name, entry in make_manifest(items).items():
        if entry["checksum"] != manifest[name]["checksum"]:
            raise _failure(path, ValueError(f"the content of {name!r} does not match its checksum"))


def manifest_of(path: Path, item: str) -> Any:
    """Return the manifest of an item of a step; None: it has none, or cannot be read."""
    try:
        return read_manifest(path).get(item)
    except (CheckpointError, Damaged):
        return None


def params_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of all parameters, frozen ones too."""
    return {**manifest[PARAMS], **manifest.get(FROZEN, {})}


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifests of a step's items. CheckpointError, Damaged: it cannot be read."""
    try:  # Orbax would open the devices, which the driver of an RL run lacks
        manifest = read_json(path / MANIFEST / "metadata")
    except Exception as error:
        raise _failure(path, error) from error
    if not isinstance(manifest, dict) or not {PARAMS, REST, EXTRAS} <= set(manifest):
        raise Damaged(f"{path / MANIFEST} lists no arrays")
    for item in (PARAMS, FROZEN):
        check_entries(path, manifest.get(item, {}))
    return manifest


def _drop_unfinished_reads() -> None:
    """Collect the reads that Orbax abandons when one fails.

    Python prints a screen for each of them when it is collected, which would bury the one error that matters. They end
    on threads of TensorStore, which then call what is collected here: twice such a thread has crashed the process.
    """
    time.sleep(_UNDER_WAY)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook


def summary(error: BaseException) -> str:
    """Return the first sentence: TensorStore's messages are a screen long."""
    text = str(error).strip().split("\n", 1)[0].split(". ", 1)[0]
    return f"{type(error).__name__}: {text[:200]}"
