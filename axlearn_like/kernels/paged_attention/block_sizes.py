"""Block sizes of the kernels of paged attention, as data: a table by TPU generation, heads, head width and page size.

What is fastest differs by a half and more between chips and shapes, so sizes are measured (`axl bench block_sizes`) and
stored, not written into code. The table of this package holds what has been measured on a chip, and nothing else: a
shape without an entry has the default sizes.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.errors import UserError, did_you_mean

TABLE = Path(__file__).with_suffix(".json")


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of blocks, in tokens. They change the last bits of results.

    Attributes:
        row_keys: keys of the cache that are fetched and attended to at once, decoding.
        row_queries: queries (of all rows together) of a step of the kernel, decoding.
        chunk_keys: as `row_keys`, in chunks of a prompt.
        chunk_queries: as `row_queries`, in chunks of a prompt.
        shared_keys: as `row_keys`, in cascade attention.
        vmem_mib: limit of a kernel's vector memory; None: the compiler's own.
    """

    row_keys: int = 512
    row_queries: int = 8
    chunk_keys: int = 512
    chunk_queries: int = 64
    shared_keys: int = 512
    vmem_mib: int | None = None

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            unset = size is None and name == "vmem_mib"
            if not unset and (type(size) is not int or size < 1):
                raise UserError(f"block sizes: {name}={size!r}; expected a whole number, 1 or more")

    @property
    def vmem_bytes(self) -> int | None:
        """The limit of vector memory in bytes."""
        return None if self.vmem_mib is None else self.vmem_mib << 20


DEFAULT = BlockSizes()


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class BlockKey:
    """Generation and shape by which block sizes are chosen.

    Attributes:
        generation: generation of the TPU, as in topologies: "v6e".
        kv_heads: key/value heads of one device.
        head_dim: width of a head in the pool, a multiple of 128.
        page_size: tokens of a page.
    """

    generation: str
    kv_heads: int
    head_dim: int
    page_size: int

    def __str__(self) -> str:
        return f"{self.generation}, {self.kv_heads} key/value heads of {self.head_dim}, pages of {self.page_size}"


@dataclasses.dataclass(frozen=True)
class BlockTable:
    """Block sizes by key, and how each was measured; a key that is not there has the default sizes."""

    sizes: Mapping[BlockKey, BlockSizes] = dataclasses.field(default_factory=dict)
    measured: Mapping[BlockKey, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def find(self, key: BlockKey) -> tuple[BlockSizes, str]:
        """Return the sizes for a key, and where they come from: "table" or "default"."""
        return (self.sizes[key], "table") if key in self.sizes else (DEFAULT, "default")

    def with_entry(self, key: BlockKey, sizes: BlockSizes, measured: Mapping[str, Any]) -> "BlockTable":
        """Return the table with an entry, in the place of one of this key."""
        return BlockTable({**self.sizes, key: sizes}, {**self.measured, key: measured})

    def write(self, path: Path) -> None:
        """Write the table, complete or not at all."""
        entries = [
            {
                **dataclasses.asdict(key),
                "sizes": dataclasses.asdict(sizes),
                "measured": dict(self.measured.get(key, {})),
            }
            for key, sizes in sorted(self.sizes.items())
        ]
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps({"entries": entries}, indent=2) + "\n")
        os.replace(part, path)


def load_table(path: Path | str | None = None) -> BlockTable:
    """Read a table; None: the one of this package.

    Raises:
        UserError: it is not there, or is no table; names the entry and the field.
    """
    found = TABLE if path is None else Path(path)
    try:
        rows = json.loads(found.read_text())["entries"]
        assert isinstance(rows, list)
    except FileNotFoundError:
        raise UserError(
            f"no table of block sizes at {found}; `axl bench block_sizes --table {found}` writes one"
        ) from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f'{found}: no table of block sizes; expected {{"entries": [...]}}') from None
    sizes, measured = {}, {}
    for number, row in enumerate(rows):
        where = f"{found}: entries[{number}]"
        row = _checked(where, row, _ENTRY)
        key = BlockKey(**{name: row[name] for name in _KEY})
        if key in sizes:
            raise UserError(f"{where}: a second entry for {key}")
        try:
            sizes[key] = BlockSizes(**_checked("sizes", row["sizes"], dict.fromkeys(_SIZES, object)))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        measured[key] = row["measured"]
    return BlockTable(sizes, measured)


_KEY: Mapping[str, type] = {"generation": str, "kv_heads": int, "head_dim": int, "page_size": int}
_ENTRY: Mapping[str, type] = {**_KEY, "sizes": dict, "measured": dict}
_SIZES = tuple(field.name for field in dataclasses.fields(BlockSizes))


def _checked(where: str, row: Any, expected: Mapping[str, type]) -> dict[str, Any]:
    """Return a JSON object that has exactly these fields, of these types."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with {', '.join(expected)}")
    for name in row:
        if name not in expected:
            raise UserError(f"{where}: no field {name!r}{did_you_mean(name, expected)}")
    for name, kind in expected.items():
        if name not in row or not isinstance(row[name], kind):
            raise UserError(f"{where}.{name}={row.get(name)!r}: expected {kind.__name__}")
    return row
