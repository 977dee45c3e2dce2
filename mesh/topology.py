"""TPU topologies, of devices that need not be there: slices of a generation, their names, their compiler.

A *device* is what jax shows as one: a chip on v4 (its two cores as one), v5e, v5p and v6e, one of the two chiplets on
tpu7x. A topology is written as libtpu writes it, generation and chips (`v5p:8x8x16`), or by the name under which it is
sold (`v5p-2048`), whose number counts TensorCores on v4, v5p and tpu7x, and chips on v5e and v6e. A generation that the
table lacks is described by its user: `v9x[memory=64;host=4;devices=2]:2x2x4` (`mesh.generations`).
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mesh.errors import UserError, did_you_mean, install_hint
from mesh.generations import GENERATIONS, Generation, describe_generation, find_generation

_TEXT = re.compile(r"([a-z0-9]+?)(?:\[([^\]]*)\])?(?:(?::|=)(\d+(?:x\d+)*)|-(\d+))")


@dataclasses.dataclass(frozen=True)
class Topology:
    """`slices` equal slices of one generation."""

    generation: Generation
    shape: tuple[int, ...]  # chips of one slice by dimension
    slices: int = 1

    @property
    def name(self) -> str:
        """The name that libtpu takes."""
        return f"{self.generation.name}:{'x'.join(map(str, self.shape))}"

    @property
    def text(self) -> str:
        """The name with what the user has said of its generation: `parse_topology` reads it."""
        said = f"[{self.generation.described}]" if self.generation.described else ""
        return f"{self.generation.name}{said}{self.name.removeprefix(self.generation.name)}"

    @property
    def devices(self) -> int:
        """The number of devices in all slices."""
        return math.prod(self.shape) * self.generation.devices * self.slices

    @property
    def hosts(self) -> int:
        """The number of virtual machines: one for up to eight chips of v5e and v6e, else one for every four chips."""
        chips = math.prod(self.shape)
        return self.slices * (1 if chips <= self.generation.largest_host else -(-chips // self.generation.host))

    @property
    def sold_as(self) -> str:
        """The name under which one slice is sold: "v5p-2048"."""
        return f"{self.generation.name}-{math.prod(self.shape) * self.generation.counted}"

    def __str__(self) -> str:
        return self.name if self.slices == 1 else f"{self.slices} x {self.name}"


def parse_topology(text: str, slices: int = 1) -> Topology:
    """Parse `v5p:8x8x16`, or of `v5p-2048` (the shape with that many chips that is nearest to a cube).

    Raises:
        UserError: there is no such generation or slice; the nearest are listed.
    """
    if slices < 1:
        raise UserError(f"--slices {slices}: expected 1 or more")
    found = _TEXT.fullmatch(text.strip().lower())
    if found is None:
        raise UserError(f"no TPU topology {text!r}; expected generation and chips, as in v5p:2x2x1, v6e:2x4 or v5p-32")
    generation = _generation(found[1], found[2], text)
    if found[4]:
        return Topology(generation, _shape_of(generation, int(found[4]), text), slices)
    shape = tuple(map(int, found[3].split("x")))
    if generation.described:
        _check_described(generation, shape, text)
    elif shape not in _shapes(generation):
        near = sorted(_shapes(generation), key=lambda other: _distance(shape, other))[:4]
        listed = ", ".join(f"{generation.name}:{'x'.join(map(str, one))}" for one in near)
        raise UserError(f"no TPU topology {text!r}; the nearest: {listed}")
    return Topology(generation, shape, slices)


def _generation(name: str, said: str | None, text: str) -> Generation:
    """Return a generation of the table, or the one that is described."""
    if said is not None:
        pairs = [part.partition("=") for part in said.split(";") if part.strip()]
        return describe_generation(name, {fact.strip(): value.strip() for fact, _, value in pairs})
    generation = find_generation(name)
    if generation is None:
        other = "another is described: v9x[memory=64;host=4]:2x2x4, GiB of a chip and chips of a machine"
        raise UserError(f"no TPU generation {name!r} in {text!r}{did_you_mean(name, GENERATIONS)}; {other}")
    return generation


def _check_described(generation: Generation, shape: tuple[int, ...], text: str) -> None:
    """Refuse a slice that is neither a part of a machine nor several complete ones."""
    chips, host = math.prod(shape), generation.host
    if not chips or (chips > host and chips % host):
        raise UserError(f"no TPU topology {text!r}: {chips} chips are no machines of {host} (host={host})")


def slices_within(kind: str, chips: int) -> list[Topology]:
    """Return slices of a generation with up to so many chips: of each size the nearest to a cube, the smallest first.

    Raises:
        UserError: there is no such generation, or it is a described one.
    """
    generation = _generation(kind, None, kind)
    found = _by_size(generation)
    return [Topology(generation, found[size]) for size in sorted(found) if size <= chips]


def topology_devices(topology: Topology) -> list[Any]:
    """Return devices to compile for, in libtpu's order.

    Raises:
        UserError: libtpu is not installed, or refuses the topology.
    """
    prepare_compiler()
    import jax
    from jax.experimental import topologies

    more: dict[str, Any] = {} if topology.slices == 1 else {"num_slices": topology.slices}
    if topology.generation.name == "v4":
        more["chip_config_name"] = "megacore"  # jax describes a real v4 chip so
    try:
        with _silence():
            described = topologies.get_topology_desc(topology_name=topology.name, platform="tpu", **more)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"libtpu knows no topology {topology}: {str(error).splitlines()[0]}") from None
    return list(described.devices)


def prepare_compiler() -> None:
    """Make libtpu work as a compiler in this process: before jax's first use of a backend.

    Raises:
        UserError: libtpu is not installed.
    """
    library = find_compiler()
    if library is None:
        raise UserError(f"libtpu, the TPU compiler, is not installed; on x86-64 Linux, {install_hint('aot')}")
    os.environ["TPU_LIBRARY_PATH"] = str(library)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def find_compiler() -> Path | None:
    """Return the path of libtpu's library: in TPU_LIBRARY_PATH, as a package, or beside the packages.

    Beside them, in `libtpu` of the virtual environment, is where the development installation puts it: jax looks for a
    TPU at every start where it finds the package.
    """
    given = Path(os.environ.get("TPU_LIBRARY_PATH", ""))
    package = importlib.util.find_spec("libtpu")
    folders = list(package.submodule_search_locations or []) if package else []
    aside = Path(sys.prefix) / "libtpu" / "libtpu"
    found = [given, *(Path(folder) / "libtpu.so" for folder in folders), aside / "libtpu.so"]
    return next((path for path in found if path.is_file()), None)


def compiler_version() -> str | None:
    """Return the version of libtpu, from its installed metadata."""
    library = find_compiler()
    known = [] if library is None else sorted(library.parent.parent.glob("libtpu-*.dist-info"))
    return known[-1].name.removeprefix("libtpu-").removesuffix(".dist-info") if known else None


# Without these libtpu asks the cloud where it is, writes logs to a common folder, lets in one process at a time, and
# complains about unknown workers.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
}


class _silence:
    """Standard error of C code, to nowhere: libtpu warns of everything that a machine without a TPU lacks."""

    def __enter__(self) -> None:
        sys.stderr.flush()
        self._saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)

    def __exit__(self, *_: Any) -> None:
        os.dup2(self._saved, 2)
        os.close(self._saved)


@functools.cache
def _shapes(generation: Generation) -> frozenset[tuple[int, ...]]:
    """Return all slices: up to four chips of one host, or complete hosts.

    In three dimensions, complete cubes of 64 chips from there on. Sources: cloud.google.com/tpu/docs/v4, /v5p and
    /tpu7x (dimensions in ascending order), /v5e and /v6e.
    """
    if len(generation.chips) == 2:
        return frozenset([(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)])
    small = {(1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)}
    largest = generation.chips
    cubes = itertools.product(*(range(4, max(largest) + 1, 4) for _ in largest))
    return frozenset(small.union(shape for shape in cubes if _fits(shape, largest)))


def _fits(shape: tuple[int, ...], largest: tuple[int, ...]) -> bool:
    return shape == tuple(sorted(shape)) and all(a <= b for a, b in zip(shape, sorted(largest), strict=True))


def _by_size(generation: Generation) -> dict[int, tuple[int, ...]]:
    """Return the shape that is nearest to a cube, by number of chips."""
    found: dict[int, tuple[int, ...]] = {}
    for shape in sorted(_shapes(generation), key=lambda one: (max(one) / min(one), one)):
        found.setdefault(math.prod(shape), shape)
    return found


def _shape_of(generation: Generation, number: int, text: str) -> tuple[int, ...]:
    if generation.described:
        raise UserError(f"no TPU topology {text!r}: the shape of a described generation is given, as in 2x2x4")
    by_number = {size * generation.counted: shape for size, shape in _by_size(generation).items()}
    if number not in by_number:
        near = sorted(by_number, key=lambda other: abs(math.log(other / max(number, 1))))[:4]
        counted = "chips" if generation.counted == 1 else "TensorCores, two to a chip"
        listed = ", ".join(f"{generation.name}-{one}" for one in near)
        raise UserError(f"no TPU topology {text!r} (the number counts {counted}); the nearest: {listed}")
    return by_number[number]


def _distance(shape: tuple[int, ...], other: tuple[int, ...]) -> tuple[float, float]:
    """Return the distance of two shapes: by the number of chips, then by form."""
    chips = abs(math.log(math.prod(shape) / math.prod(other))) if math.prod(shape) else math.inf
    pairs: Iterator[tuple[int, int]] = itertools.zip_longest(sorted(shape), sorted(other), fillvalue=1)
    return chips, sum(abs(a - b) for a, b in pairs)
