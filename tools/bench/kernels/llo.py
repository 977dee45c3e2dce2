"""Code of Pallas kernels, as the TPU compiler reports it: instructions, and registers that it spills.

libtpu writes the code of each operation that it compiles, if LIBTPU_INIT_ARGS says so before it is loaded. A bundle is
what a core issues at once, about a cycle. These figures are those of the code, not of a run: a loop counts once, and
waiting for memory is not seen. So they say how register-bound a kernel is, and compare kernels of the same loops.
"""

import re
from pathlib import Path

_KERNEL = re.compile(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"")
_BUNDLES = re.compile(r"\d+-(?P<name>.+?)-\d+-final_hlo-static-per-bundle-utilization\.txt")
_SPILLS, _FILLS = "VSTORE:SPILL", "VLOAD:FILL"


def dump_flags(folder: Path) -> dict[str, str]:
    """Return the environment with which libtpu writes its code into a folder."""
    return {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"}


def kernel_code(folder: Path, program: str) -> dict[str, int]:
    """Return bundles, and spills and fills of vector registers, of all Pallas kernels of a program together.

    What libtpu has written is deleted.

    Args:
        folder: folder of the dumps.
        program: its text after optimisation.
    """
    kernels = set(_KERNEL.findall(program))
    found = {"bundles": 0, "spills": 0, "fills": 0}
    for path in sorted(folder.iterdir()):
        match = _BUNDLES.fullmatch(path.name)
        if match and match["name"] in kernels:
            for figure, count in _read(path.read_text()).items():
                found[figure] += count
        path.unlink()
    return found


def _read(text: str) -> dict[str, int]:
    """Return the figures of one table: the names of slots, their capacity, and a row for each bundle."""
    lines = text.splitlines()
    header = next(index for index, line in enumerate(lines) if _SPILLS in line)
    names = [name.strip() for name in lines[header].split(",")]
    rows = [line.split() for line in lines[header + 2 :] if re.fullmatch(r"[\d ]+", line)]

    def total(slot: str) -> int:
        return sum(int(row[names.index(slot)]) for row in rows)

    return {"bundles": len(rows), "spills": total(_SPILLS), "fills": total(_FILLS)}
