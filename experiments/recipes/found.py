"""A way to run a job on a machine: what devices hold, in words too, and the seconds that are predicted for a step."""

import dataclasses
import math

from axlearn_like.layers.decoder import Decoder
from experiments.recipes.machines import Machine
from experiments.recipes.sizes import Bytes, Job, Method, model_sizes, row_flops
from mesh.cost.roofline import HBM_EFFICIENCY

# Predicted seconds: products at this share of the peak, recomputation included; in mixtures of experts at half of it.
# The compiler's estimates of the 34 steps of docs/reference/mesh-rules.md are 0.5 to 2 times as long.
_OF_PEAK = 3 / 8


@dataclasses.dataclass(frozen=True)
class Engines:
    """Rollout engines."""

    devices: str  # devices of each, as a fleet names them; "trainer": the trainer's, by turns, in one process
    workers: int  # number of them
    mesh: dict[str, int]
    sequences: int  # sequences drawn at a time by each; pages have room for as many of full length
    int8: bool  # weights are held as int8 numbers
    holds: Bytes  # bytes of a device at the peak of drawing


@dataclasses.dataclass(frozen=True)
class Fit:
    """A way to run a job on a machine."""

    job: Job
    machine: Machine
    trainer: str  # devices of the trainer, as a fleet names them
    method: Method
    mesh: dict[str, int]  # axes of the trainer
    rows: int  # examples of a batch, or rollouts of an update
    rows_at_once: int  # rows at a time on each device, or group of devices that share rows
    accumulation: int  # microbatches of a batch; of packed rollouts the most
    remat: str
    packing: tuple[int, int] | None  # tokens for prompts and answers of a packed row; None: rows are not packed
    holds: Bytes  # bytes of a device of the trainer, at the peak of a step
    engines: Engines | None = None
    seconds: float | None = None  # seconds predicted for a step; None: nothing is known of the devices' speed

    @property
    def fleet(self) -> str | None:
        """The roles' devices as `axl rl --fleet` takes them; None: there are no engines."""
        if self.engines is None:
            return None
        number = f"{self.engines.workers} x " if self.engines.workers > 1 else ""
        return f"trainer={self.trainer},workers={number}{self.engines.devices}"

    @property
    def why(self) -> str:
        """The arithmetic, in one line."""
        return f"{arithmetic(self.holds)} of {gigabytes(self.machine.memory)} of a device ({self.machine.source})"


def arithmetic(holds: Bytes) -> str:
    """Return a sum in words: parts and total, in GB."""
    parts = " + ".join(f"{name} {size / 1e9:.1f}" for name, size in holds.items())
    return f"{parts} = {gigabytes(sum(holds.values()))}"


def gigabytes(size: float) -> str:
    """Return bytes as text."""
    return f"{size / 1e9:.1f} GB"


def predicted_seconds(found: Fit, model: Decoder.Config, prompt: int, answer: int) -> float | None:
    """Return the seconds of a step with prompts and answers of so many tokens; None: the speed is not known."""
    machine, engines = found.machine, found.engines
    if machine.flops is None or machine.bandwidth is None:
        return None
    flops = found.rows * row_flops(model, prompt + answer)
    peak = math.prod(found.mesh.values()) * machine.flops * (_OF_PEAK / 2 if model_sizes(model).experts else _OF_PEAK)
    if engines is None:
        return flops / peak
    rounds = math.ceil(found.rows / (engines.workers * engines.sequences))
    read = engines.holds["weights"] + engines.holds["pages"] * (prompt + answer / 2) / (prompt + answer)
    drawing = rounds * answer * read / machine.bandwidth / HBM_EFFICIENCY
    return flops / peak + drawing if engines.devices == "trainer" else max(flops / peak, drawing)
