"""Checkpoints whose files would take all time or memory, or never end, for `tests.measured`."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tensorstore as ts

from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.checkpoint.versions import CheckpointError, find_version
from tests.axlearn_like.checkpoint.plain.test_chunks import ORDERS, PARAMS, write
from tests.axlearn_like.checkpoint.test_checkpointer import make_state
from tests.axlearn_like.checkpoint.test_tiers import tiers
from tests.measured import Cases
from tests.models.huggingface.checkpoints.hostile_models import PLACES

_MADE = Path(tempfile.gettempdir()) / f"hostile-checkpoints-{os.getpid()}"
_HUGE = (10**6, 10**12, 10**30, -1, "x")
_OF_ORBAX = (
    "_CHECKPOINT_METADATA",
    "manifest/metadata",
    "extras/metadata",
    "params/_METADATA",
    "params/manifest.ocdbt",
)
_OF_CHUNKS = ("manifest/metadata", "params/layers.q_dkh/zarr.json", "params/layers.q_dkh/c.0.0.0.0")


def prepare() -> None:
    """Make and read one of each kind, so that cases are charged for no import."""
    _MADE.mkdir()
    one = tiers(_MADE / "orbax")
    one.save(1, make_state(1), {"n": 1}, None)
    one.close()
    write(_MADE / "chunks" / "checkpoints", PARAMS, ORDERS, 10**6, digests=True)
    for kind in ("orbax", "chunks"):
        restore_params(_MADE / kind)


def finish() -> None:
    """Remove them."""
    shutil.rmtree(_MADE)


def _read(kind: str, damage: Callable[[Path], object], folder: Path) -> None:
    shutil.copytree(_MADE / kind, folder / "run")
    damage(find_version(folder / "run").path)
    restore_params(folder / "run")


def _replaced(name: str, put: Callable[[Path], object], step: Path) -> None:
    (step / name).unlink(missing_ok=True)
    put(step / name)


def _changed(name: str, change: Callable[[Any], object], step: Path) -> None:
    found = json.loads((step / name).read_bytes())
    change(found)
    (step / name).write_text(json.dumps(found))


def _shape(value: Any, manifest: Any) -> None:
    """Give all arrays of a manifest a long axis."""
    for entry in manifest["params"].values():
        entry["shape"] = [value, *entry["shape"][1:]]


def _in_store(change: Callable[[Any], object], step: Path) -> None:
    """Change how TensorStore's own description of each array is, in its database."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{step / 'params'}/"}).result()
    for key in store.list().result():
        if key.endswith((b".zarray", b"zarr.json")):
            described = json.loads(store.read(key).result().value)
            change(described)
            store.write(key, json.dumps(described).encode()).result()


def _of_store(value: Any, described: Any) -> None:
    described["shape"] = [value] * len(described["shape"])


def _chunks_of_store(value: Any, described: Any) -> None:
    described["chunks"] = [value] * len(described["chunks"])


def _of_file(value: Any, described: Any) -> None:
    described["shape"] = [value, *described["shape"][1:]]


def _chunks_of_file(value: Any, described: Any) -> None:
    described["chunk_grid"]["configuration"]["chunk_shape"] = [value] * len(described["shape"])


def _best(text: str, folder: Path) -> None:
    """Ask for the best of a run whose index of the best is not what was written."""
    shutil.copytree(_MADE / "orbax", folder / "run")
    (folder / "run" / "checkpoints" / "best").mkdir()
    (folder / "run" / "checkpoints" / "best" / "best.json").write_text(text)
    raise CheckpointError(f"no best: {find_version(f'{folder}/run@best')}")


CASES: Cases = {
    **{
        f"{kind}: {file} is {name}": partial(_read, kind, partial(_replaced, file, put))
        for kind, files in (("orbax", _OF_ORBAX), ("chunks", _OF_CHUNKS))
        for file in files
        for name, put in PLACES.items()
        if (file, name) != ("_CHECKPOINT_METADATA", "a directory")  # the parameters are read without it
    },
    **{
        f"{kind}: an axis of the manifest is {value}": partial(
            _read, kind, partial(_changed, "manifest/metadata", partial(_shape, value))
        )
        for kind in ("orbax", "chunks")
        for value in _HUGE
    },
    **{
        f"orbax: {name} of the store are {value}": partial(_read, "orbax", partial(_in_store, partial(change, value)))
        for name, change in (("axes", _of_store), ("chunks", _chunks_of_store))
        for value in _HUGE
    },
    **{
        f"chunks: {name} of an array is {value}": partial(
            _read, "chunks", partial(_changed, "params/layers.q_dkh/zarr.json", partial(change, value))
        )
        for name, change in (("an axis", _of_file), ("each axis of a chunk", _chunks_of_file))
        for value in _HUGE
    },
    "an index of the best is deep": partial(_best, "[" * 200_000),
    "an index of the best is long": partial(_best, '{"steps": {' + ", ".join(['"1": 2'] * 3_000_000) + "}}"),
}
