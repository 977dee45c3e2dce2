"""A row of docs/benchmarks/weights.md: lossless deltas on real updates, the demo's policy under GRPO at a rate of 1e-6.

    python -m tests.studies.deltas

The policy is fine-tuned by supervision first, and makes some updates before the first version that counts. The worker
requests bfloat16, as inference does; the trainer has float32. Bytes are those transferred for each version against the
previous one, without requests; received arrays are compared to the bit.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import to_text
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.run.directory import RunDirectory
from experiments.demo.config import demo
from experiments.demo.data import task_mixture
from rl.experiment import RLExperiment
from rl.parameter_server.client import connect
from rl.parameter_server.codecs import get_codec
from rl.parameter_server.server import ParameterServer
from rl.rollout.engine import RolloutEngine
from rl.runtime.inprocess import run_inprocess
from rl.training.trainer import PolicyTrainer
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import ReasoningGymScorer

RATE = 1e-6
BURN_IN = 16  # updates before the first version that is a base
PAIRS = 8
BF16 = np.dtype(ml_dtypes.bfloat16)

type Version = dict[str, np.ndarray]  # tensors by path

_versions: list[Version] = []  # of the run in progress: a trainer is built from a config, which holds no list


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Measure `delta_bytes_ratio`, `delta_cpu_s_per_gb` and `delta`."""
    versions = _pretended() if quick else _trained()
    ratios = _through_the_server(versions)
    costs, nbytes = _cpu_seconds([{path: array.astype(BF16) for path, array in one.items()} for one in versions])
    parameters = sum(array.size for array in versions[0].values())
    about = {"lr": RATE, "parameters": parameters, "measured_on_bytes": nbytes}
    return {
        "delta_bytes_ratio": statistics.median(ratios),
        "delta_cpu_s_per_gb": costs,
        "delta": {**about, "ratio_by_version": ratios},
    }


def _through_the_server(versions: Sequence[Version]) -> list[float]:
    """Return bfloat16 bytes divided by bytes transferred, for each version but the first, which has no base."""
    server = ParameterServer.Config(codec="delta", shared_memory=False, keep=2).build()
    access = connect(server.cfg, [server.listen])
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {path: jax.ShapeDtypeStruct(array.shape, BF16, sharding=here) for path, array in versions[0].items()}
    publisher, receiver = access.publisher(dtypes=lambda path, dtype: BF16), access.receiver(like)
    ratios = []
    for number, version in enumerate(versions):
        publisher.publish_async({path: jnp.asarray(array) for path, array in version.items()}, number).wait()
        pulled = receiver.pull(number)
        for path, array in version.items():
            if not np.array_equal(np.asarray(pulled[path]).view(np.uint16), array.astype(BF16).view(np.uint16)):
                raise AssertionError(f"version {number}: {path} came otherwise")
        ratios.append(receiver.stats.needed / receiver.stats.network)
    server.close()
    return ratios[1:]


def _cpu_seconds(versions: Sequence[Version]) -> tuple[dict[str, float], int]:
    """Return CPU seconds per GB, on all versions as a single array, each against the previous one; and its bytes.

    The policy is small: with a single version the calls would dominate, not the bytes.
    """
    codec = get_codec("delta")
    flat = [np.concatenate([array.reshape(-1) for array in version.values()]) for version in versions]
    base, array = np.concatenate(flat[:-1]), np.concatenate(flat[1:])
    encode, decode = [], []
    for _ in range(3):
        began = time.process_time()
        blob = codec.encode(array, base)
        encoded = time.process_time()
        codec.decode(blob, shape=array.shape, dtype=array.dtype, base=base)
        encode.append(encoded - began)
        decode.append(time.process_time() - encoded)
    middle = {"encode": statistics.median(encode), "decode": statistics.median(decode)}
    return {name: round(seconds / array.nbytes * 1e9, 3) for name, seconds in middle.items()}, array.nbytes


class SnapshotTrainer(PolicyTrainer):
    """A trainer that keeps a copy of the parameters after each update."""

    def run_once(self, timeout: float = 0.0) -> bool:
        """Make an update if a batch is there, and keep its parameters."""
        updated = super().run_once(timeout)
        if updated:
            leaves, _ = jax.tree_util.tree_flatten_with_path(self.state["params"])
            _versions.append({jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves})
        return updated


def _trained() -> list[Version]:
    """Return the parameters after the last updates of the demo, in one process, 8 x 8 rollouts each, constant rate."""
    cfg = demo(steps=BURN_IN + PAIRS)
    never = 10 * cfg.num_steps
    scorer = ReasoningGymScorer.Config(mixture=task_mixture(cfg.seed), pass_mark=1.0)
    cfg.set(
        prompts_per_step=8,
        samples_per_prompt=8,
        groups_per_lease=8,
        staleness=0,
        learner=Learner.Config(optimizer=AdamW.Config(b2=0.98), schedule=Constant.Config(lr=RATE), clip_norm=0.5),
        trainer=SnapshotTrainer.Config(
            checkpoint=Checkpointer.Config(save_every=never), row_multiple=8, logprob_diff_every=never
        ),
        engine=RolloutEngine.Config(max_num_seqs=64, keep_completions=False),
        verifier=InlineVerifier.Config(scorer=scorer),
        evaluation=None,
    )
    _versions.clear()
    with tempfile.TemporaryDirectory() as name, RunDirectory.open(Path(name) / "run", to_text(cfg)) as run:
        run_inprocess(RLExperiment(cfg), run, lambda: False, lambda step: None)
    return _versions[-PAIRS - 1 :]


def _pretended() -> list[Version]:
    """Return made-up versions, in which one entry in a hundred changes."""
    first = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    second = first.copy()
    second.reshape(-1)[::100] *= np.float32(1.01)
    return [{"w": first}, {"w": second}]


if __name__ == "__main__":
    print(json.dumps(measure()))
