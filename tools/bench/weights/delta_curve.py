"""Size and cost of lossless deltas of weights, over learning rates and gaps, on steps of a real RL run.

    python -m tools.bench.weights.delta_curve --json docs/figures/delta_curve.json

The policy of the demo is fine-tuned by supervision once. GRPO with AdamW continues from it at each
constant learning rate. Every version is kept, as float32 masters and as bfloat16 casts, and encoded against those 1, 4,
16 and 64 updates before it: tensor by tensor, decoded, and compared to the bit. The first update, in which Adam moves
every entry by the whole learning rate, is a column of its own.
"""

import argparse
import datetime
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import to_text
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.run.directory import RunDirectory
from axlearn_like.training.trainer import Trainer
from experiments.reasoning_gym import demo, task_mixture
from mesh import enable_compilation_cache
from rl.experiment import RLExperiment, warm_start_directory
from rl.parameter_server.codecs import get_codec
from rl.rollout.engine import RolloutEngine
from rl.runtime.inprocess import run_inprocess
from rl.training.trainer import PolicyTrainer
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import ReasoningGymScorer
from tools.bench.harness.circumstances import machine

LEARNING_RATES = (1e-7, 1e-6, 1e-5, 1e-4)
GAPS = (1, 4, 16, 64)
BURN_IN = 16  # updates before the first version that is a base
PACKAGES = ("jax", "numpy", "zstandard", "xxhash")
PAIRS = 6  # versions encoded for each gap, evenly spread; all versions for the largest gap
BF16 = np.dtype(ml_dtypes.bfloat16)

type Version = dict[str, np.ndarray]  # tensors by path

_versions: list[Version] = []  # of the run in progress: a trainer is built from a config, which holds no list


class SnapshotTrainer(PolicyTrainer):
    """A trainer that keeps a copy of the parameters before the first update and after each."""

    def start(self) -> None:
        """Keep version 0 and start."""
        _versions.append(_flat(self.state["params"]))
        super().start()

    def run_once(self, timeout: float = 0.0) -> bool:
        """Make an update if a batch is there, and keep its parameters."""
        updated = super().run_once(timeout)
        if updated:
            _versions.append(_flat(self.state["params"]))
        return updated


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the curve; write the figures and the plot, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures; a plot is drawn beside it")
    parser.add_argument("--rates", type=float, nargs="+", default=LEARNING_RATES, help="learning rates")
    parser.add_argument("--updates", type=int, default=BURN_IN + max(GAPS), help="updates at each rate")
    parser.add_argument("--warm-start", type=Path, help="where the fine-tuned policy is kept, or is found")
    parsed = parser.parse_args(arguments)
    enable_compilation_cache()  # each rate compiles the same programs
    about = {
        "command": " ".join(
            ["python -m tools.bench.weights.delta_curve", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {"python": sys.version.split()[0], **{name: package_version(name) for name in PACKAGES}},
    }
    began = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_start = fine_tune(parsed.warm_start or folder / "warm_start")
        result: dict[str, Any] = {"points": [], "first_update": [], "speed": []}
        for rate in parsed.rates:
            versions = train(folder, warm_start, rate, parsed.updates)
            for part, figures in measure(versions, rate).items():
                result[part] += figures
            tensors = {path: int(array.size) for path, array in versions[0].items()}
            result |= {**about, "parameters": sum(tensors.values()), "tensors": tensors, "burn_in": BURN_IN}
            result["cpu_s"] = round(time.process_time() - began, 1)
            if parsed.json:
                parsed.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    if parsed.json:
        draw(result, parsed.json.with_suffix(".svg"))


def fine_tune(folder: Path) -> Path:
    """Run the demo's supervised phase, unless a finished run of it is there."""
    cfg = demo().warm_start
    assert cfg is not None
    with RunDirectory.open(folder, to_text(cfg)) as run:
        Trainer(cfg).run(run)
    return folder


def measure(versions: Sequence[Version], rate: float) -> dict[str, list[dict[str, Any]]]:
    """Return `points` of the curve, the `first_update`, and `speed`, for both dtypes."""
    figures: dict[str, list[dict[str, Any]]] = {"points": [], "first_update": [], "speed": []}
    for dtype in (BF16, np.dtype(np.float32)):
        cast = [_cast(version, dtype) for version in versions]
        name = {"lr": rate, "dtype": dtype.name}
        figures["first_update"].append({**name, "gap": 1, **encode_pairs(cast, [(0, 1)])})
        for gap in (gap for gap in GAPS if gap + BURN_IN < len(versions)):
            pairs = [(end - gap, end) for end in _spread(BURN_IN + gap, len(versions) - 1)]
            figures["points"].append({**name, "gap": gap, **encode_pairs(cast, pairs)})
        figures["speed"].append({**name, "gap": 1, **cpu_seconds(cast[BURN_IN:])})
    return figures


def train(folder: Path, warm_start: Path, rate: float, updates: int) -> list[Version]:
    """Return the float32 parameters of versions 0 to `updates`."""
    experiment = RLExperiment(experiment_at(rate, updates))
    _versions.clear()
    with RunDirectory.open(folder / f"lr{rate:g}", to_text(experiment.cfg)) as run:
        shutil.copytree(warm_start, warm_start_directory(run))
        run_inprocess(experiment, run, lambda: False, lambda step: None)
    return list(_versions)


def experiment_at(rate: float, updates: int) -> RLExperiment.Config:
    """Return the demo, synchronous, in one process, with 8 x 8 rollouts an update at a constant learning rate."""
    cfg = demo(steps=updates)
    scorer = ReasoningGymScorer.Config(mixture=task_mixture(cfg.seed), pass_mark=1.0)
    return cfg.set(
        groups=8,
        samples=8,
        groups_per_lease=8,
        staleness=0,
        learner=Learner.Config(optimizer=AdamW.Config(b2=0.98), schedule=Constant.Config(lr=rate), clip_norm=0.5),
        trainer=SnapshotTrainer.Config(
            checkpoint=Checkpointer.Config(save_every=10 * updates), row_multiple=8, logprob_diff_every=10 * updates
        ),
        engine=RolloutEngine.Config(max_num_seqs=64, keep_completions=False),
        verifier=InlineVerifier.Config(scorer=scorer),
        evaluation=None,
    )


def encode_pairs(versions: Sequence[Version], pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return medians over pairs (base, version) of the bytes of all tensors, and of each kind of tensor.

    `ratio` is bytes as bfloat16 divided by bytes of the delta, headers of all tensors included, for every dtype.
    """
    rows = [list(_encode(versions[base], versions[version])) for base, version in pairs]
    kinds = sorted({row["kind"] for row in rows[0]})
    figures = _figures(rows)
    by_kind = {kind: _figures([[row for row in pair if row["kind"] == kind] for pair in rows]) for kind in kinds}
    return {"pairs": len(pairs), **figures, "by_kind": by_kind}


def _encode(base: Version, version: Version) -> Iterator[dict[str, Any]]:
    codec = get_codec("delta")
    for path, array in version.items():
        blob = codec.encode(array, base[path])
        decoded = codec.decode(blob, shape=array.shape, dtype=array.dtype, base=base[path])
        new, old = (x.view(f"u{x.dtype.itemsize}") for x in (array, base[path]))
        if not np.array_equal(decoded.view(new.dtype), new):
            raise AssertionError(f"{path} came back otherwise")
        changes = int(np.count_nonzero(new != old))
        yield {"kind": _kind(path), "entries": array.size, "nbytes": len(blob), "changes": changes}


def _figures(pairs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    def middle(figure: Callable[[int, int, int], float]) -> float:
        keys = ("entries", "nbytes", "changes")
        return float(f"{statistics.median(figure(*(sum(r[k] for r in rows) for k in keys)) for rows in pairs):.4g}")

    return {
        "ratio": middle(lambda entries, nbytes, changes: 2 * entries / nbytes),
        "bits_per_entry": middle(lambda entries, nbytes, changes: 8 * nbytes / entries),
        "changed": middle(lambda entries, nbytes, changes: changes / entries),
    }


def cpu_seconds(versions: Sequence[Version]) -> dict[str, float]:
    """Return CPU seconds per GB of weights, on all versions in order as a single array, each against the previous one.

    The policy is small: with a single version the calls would dominate, not the bytes.
    """
    codec = get_codec("delta")
    flat = [np.concatenate([array.reshape(-1) for array in version.values()]) for version in versions]
    base, array = np.concatenate(flat[:-1]), np.concatenate(flat[1:])
    seconds: dict[str, list[float]] = {"encode": [], "decode": []}
    for _ in range(3):
        began = time.process_time()
        blob = codec.encode(array, base)
        encoded = time.process_time()
        codec.decode(blob, shape=array.shape, dtype=array.dtype, base=base)
        seconds["encode"].append(encoded - began)
        seconds["decode"].append(time.process_time() - encoded)
    gigabytes = array.nbytes / 1e9
    figures = {f"{what}_cpu_s_per_gb": round(statistics.median(s) / gigabytes, 3) for what, s in seconds.items()}
    return {**figures, "nbytes": array.nbytes, "ratio": float(f"{2 * array.size / len(blob):.4g}")}


def table(result: Mapping[str, Any]) -> str:
    """Format the curve, the first update and the cost as Markdown."""
    head = ["dtype", "lr", *(f"gap {gap}" for gap in GAPS), "first update", "encode CPU-s/GB", "decode CPU-s/GB"]
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2)]
    for speed in result["speed"]:
        own = [p for p in result["points"] if (p["lr"], p["dtype"]) == (speed["lr"], speed["dtype"])]
        cells = {point["gap"]: f"{point['ratio']:.3g} ({100 * point['changed']:.2g} %)" for point in own}
        first = next(p for p in result["first_update"] if (p["lr"], p["dtype"]) == (speed["lr"], speed["dtype"]))
        lines.append(
            [speed["dtype"], f"{speed['lr']:.0e}", *(cells.get(gap, "") for gap in GAPS)]
            + [f"{first['ratio']:.3g} ({100 * first['changed']:.2g} %)"]
            + [f"{speed[f'{what}_cpu_s_per_gb']:.2f}" for what in ("encode", "decode")]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw ratio over gap, a line for each learning rate, bfloat16. Needs matplotlib (the extra `dev`)."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="gap (updates)", ylabel="bfloat16 bytes / delta bytes")
    for rate in sorted({point["lr"] for point in result["points"]}):
        points = [p for p in result["points"] if p["lr"] == rate and p["dtype"] == "bfloat16"]
        axes.plot([p["gap"] for p in points], [p["ratio"] for p in points], marker="o", label=f"lr {rate:.0e}")
    axes.axhline(10, color="gray", linestyle=":")
    axes.set_xticks(GAPS, [str(gap) for gap in GAPS], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):  # the same bytes each time
        figure.savefig(path, metadata={"Date": None})


def _flat(params: Any) -> Version:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.array(leaf) for path, leaf in leaves}


def _cast(version: Version, dtype: np.dtype) -> Version:
    return {path: array.astype(dtype) for path, array in version.items()}


def _kind(path: str) -> str:
    words = {"embed": "embedding", "attention": "attention", "feed_forward": "feed_forward"}
    if "norm" in path or path.endswith("scale"):
        return "norm"
    return next((kind for word, kind in words.items() if word in path), "other")


def _spread(first: int, last: int) -> list[int]:
    """Return at most PAIRS integers from `first` to `last`, evenly spread."""
    return sorted({round(x) for x in np.linspace(first, last, PAIRS)})


if __name__ == "__main__":
    from tools.bench.weights.delta_curve import (
        main as run,
    )

    run()
