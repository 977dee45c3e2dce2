"""Tables of what is supported, from where the proofs are stored: docs/reference/support.md, docs/how-to/use-gpus.md.

    python -m tests.golden.support

Tests compare the pages with what this makes (tests/golden/test_support.py).
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from axlearn_like.config import ConfigError, with_mesh_rules
from axlearn_like.layers.base import build_abstract
from experiments.recipes.recipes import recipes
from experiments.registry import entries, get
from mesh.generations import GENERATIONS
from models.catalog import FAMILIES
from rl.fleet.devices import parse_devices
from tests.golden.parity import EXPORTED, names
from tests.golden.recipes import stored as compiled_recipes
from tests.golden.rules import smallest_slice, stored
from tests.golden.simulated import stored as simulated_recipes
from tools.aot.model_card import _decode_kernel, _kernel  # pyright: ignore[reportPrivateUsage]
from tools.experiment import commands_of

DOCS = Path(__file__).parents[2] / "docs"
GPUS = ("h100", "h200")
MEASURED = {
    "demo": "benchmarks/learning.md",
    **dict.fromkeys(("demo_dpo", "demo_ipo", "demo_orpo", "demo_simpo", "demo_kto"), "how-to/align.md"),
    **dict.fromkeys(("demo_sft", "demo_distillation"), "how-to/distil.md"),
    "small_llama": "how-to/small-model.md",
    "text_to_sql": "benchmarks/text-to-sql.md",
}
_LENGTH = 4096
_OTHER = "not Splash: for TPUs, not for gpu"  # said of every model
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def pages() -> dict[Path, dict[str, str]]:
    """Return the tables of each page by name."""
    return {
        DOCS / "reference" / "support.md": {
            "jobs": jobs(),
            "recipes": by_recipe(),
            "cpu": on_cpu(),
            "families": families(),
        },
        DOCS / "how-to" / "use-gpus.md": {"attention": attention("gpu")},
    }


def written(text: str, tables: dict[str, str]) -> str:
    """Return a page with its tables between their marks."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        assert text.count(begin) == text.count(end) == 1, name
        text = re.sub(f"{begin}.*{end}", lambda _, t=table, b=begin, e=end: f"{b}\n{t}\n{e}", text, flags=re.DOTALL)
    return text


def jobs() -> str:
    """Return experiments with mesh rules by device: compiled by libtpu, or computed; with the smallest slice."""
    compiled, rows = stored(), list[list[str]]()
    for name in entries():
        cfg = get(name)
        if not getattr(cfg, "mesh_rules", ()):
            continue
        job = "RL" if commands_of(cfg)[:1] == ("rl",) else "supervised"
        row = [f"`{name}`", job]
        for generation in GENERATIONS:
            topology = smallest_slice(cfg, generation)
            proof = "compiled" if f"{name}.{generation}" in compiled else "computed"
            row.append("-" if topology is None else f"{topology.name.partition(':')[2]}: {proof}")
        for gpu in GPUS:
            size = next((size for size in _SIZES if _has_rule(cfg, f"{gpu}:{size}")), None)
            row.append("-" if size is None else f"{size}: computed")
        rows.append([*row, _proofs(row)])
    return _table(["", "job", *GENERATIONS, *(gpu.upper() for gpu in GPUS), "proof"], rows)


def by_recipe() -> str:
    """Return recipes by device: all machines of each kind, by how each is known."""
    compiled, by_clock, rows = compiled_recipes(), simulated_recipes(), list[list[str]]()
    kinds = ("v5e", "v6e", "v5p", "tpu7x", *GPUS, "cpu")
    for recipe in recipes().values():
        row = [f"`{recipe.name}`", "RL" if recipe.job == "rl" else "supervised"]
        for kind in kinds:
            known: dict[str, list[str]] = {}
            for one in (one for one in recipe.machines if one.startswith(f"{kind}:")):
                name = f"{recipe.name} {one}"
                proof = ["compiled" if name in compiled else "computed"] + ["simulated"] * (name in by_clock)
                known.setdefault(" and ".join(proof), []).append(one.partition(":")[2])
            row.append("<br>".join(f"{proof}: {', '.join(known[proof])}" for proof in sorted(known)) or "-")
        rows.append(row)
    return _table(["", "job", *(kind.upper() if kind in (*GPUS, "cpu") else kind for kind in kinds)], rows)


def _proofs(row: list[str]) -> str:
    """Return the kinds of proof in a row, the strongest first."""
    said = {proof for cell in row for proof in cell.partition(": ")[2].split(", ")}
    return ", ".join(kind for kind in ("measured", "compiled", "simulated", "computed") if kind in said)


def on_cpu() -> str:
    """Return experiments whose losses or scores were measured on CPUs, by the page that has the figures."""
    rows: list[list[str]] = []
    for name, place in MEASURED.items():
        text = (DOCS / place).read_text(encoding="utf-8")
        assert name in text and " %" in text, f"{place} has no figures of {name}"
        job = "RL" if commands_of(get(name))[:1] == ("rl",) else "supervised"
        rows.append([f"`{name}`", job, f"measured ([{Path(place).stem}](../{place}))"])
    return _table(["", "job", "CPU"], rows)


def families() -> str:
    """Return what was held against transformers, each family of `config.json` by itself."""
    exported = json.loads(EXPORTED.read_text())["models"]
    rows = []
    for name in names():
        rows.append([f"`{name}`", "measured on CPU", "measured on CPU" if name in exported else "-"])
    return _table(["config.json", "import: logits, gradient, decoding", "export, loaded by transformers"], rows)


def attention(platform: str) -> str:
    """Return which attention the published models get, in bfloat16."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for title, family in FAMILIES.items():
        for name in family.names:
            model = build_abstract(family(name))
            kernels = (
                _kernel(model, platform, _LENGTH).replace(f" ({_OTHER})", "").replace(f"{_OTHER}; ", ""),
                _decode_kernel(model, platform),
            )
            found.setdefault((title, *kernels), []).append(name)
    rows = [[_names(sizes), training, decoding] for (_, training, decoding), sizes in found.items()]
    return _table(["models", "updates and scoring", "decoding"], rows)


def _names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"


def _has_rule(cfg: object, devices: str) -> bool:
    try:
        with_mesh_rules(cfg, parse_devices(devices, "devices").name)  # pyright: ignore[reportArgumentType]
    except ConfigError:
        return False
    return True


def _table(heading: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heading, ["---"] * len(heading), *rows])


def main() -> None:
    """Write the tables."""
    for path, tables in pages().items():
        path.write_text(written(path.read_text(), tables))


if __name__ == "__main__":
    main()
