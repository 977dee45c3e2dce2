"""Method, mesh and rows with which a model is trained on a machine, and the engines: what fits, by arithmetic.

    fit(model, "rl", "v5e:2x4", prompt_tokens=512, answer_tokens=1024, rows=64)

Methods are tried in their order, and for each the meshes over which the rows divide, those whose devices share no row
first. What does not fit is refused with what would. Nothing is compiled: `axl recipes --check` asks the compiler.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from axlearn_like.layers.decoder import Decoder
from experiments.recipes.device_rules import LARGE_FSDP
from experiments.recipes.found import Engines, Fit, arithmetic, gigabytes, predicted_seconds
from experiments.recipes.machines import Machine, find_machine
from experiments.recipes.sizes import (
    ADAPTED,
    METHODS,
    Bytes,
    Job,
    Method,
    ModelSizes,
    TrainingWay,
    attended_tokens,
    engine_bytes,
    model_sizes,
    scoring_bytes,
    training_bytes,
)
from mesh.errors import UserError
from rl.fleet.devices import ANY_GPU, RoleDevices
from rl.fleet.fleet import Fleet
from rl.rollout.config import engine_mesh

_AT_ONCE = 16_384  # tokens of a device in a microbatch: more gain no speed
_PACKED = 2048  # tokens of answers in a packed row, or a multiple
_SEQUENCES = 128  # limit of what an engine draws at a time
_COUNTED = 0.9  # share of an engine's memory for what is counted here; the rest is for prefill and logits
# Machines that a refusal on a CPU or an unknown GPU proposes: the first that is large enough.
_PROPOSED = ("v6e:1x1", "h100:1", "v5e:2x4", "v6e:2x4", "h100:8", "h200:8", "v6e:8x8", "v6e:16x16")


class _Short(NamedTuple):
    needed: float  # bytes of a device; infinite: rows do not divide
    why: str


def fit(
    model: Decoder.Config,
    job: Job,
    devices: str | RoleDevices | Machine | Fleet,
    *,
    prompt_tokens: int,
    answer_tokens: int,
    rows: int,
    methods: Sequence[Method] = METHODS,
    copies: int = 0,
) -> Fit:
    """Return the way to train a model on these devices.

    Args:
        model: config of a decoder without wrappers.
        job: "sft", or "rl" with its rollouts on the same devices.
        devices: `v5e:2x4`, `h100:8`, `cpu:2`, `here`, or described; a fleet, whose workers are where it says.
        prompt_tokens: tokens of a prompt, at most.
        answer_tokens: tokens of an answer, at most; both together are a row of sft.
        rows: examples, or rollouts, of a step.
        methods: those that may be used, the best first.
        copies: policies that the trainer holds beside its own, in float32, such as a reference.

    Raises:
        UserError: nothing fits, with what would.
    """
    workers = None
    if isinstance(devices, Fleet):
        apart = devices.workers is not None and not devices.together and job == "rl"
        workers = (devices.workers or 1, find_machine(devices.worker)) if apart else (0, find_machine(devices.trainer))
        devices = devices.trainer
    machine = devices if isinstance(devices, Machine) else find_machine(devices)
    search = _Search(model_sizes(model), job, (prompt_tokens, answer_tokens), rows, tuple(methods), copies)
    found = search.on(machine, workers)
    if isinstance(found, _Short):
        ways = "; ".join(search.alternatives(machine))
        raise UserError(f"{job} of {rows} rows on {machine.text} does not fit: {found.why}. What would: {ways}")
    return dataclasses.replace(found, seconds=predicted_seconds(found, model, prompt_tokens, answer_tokens))


@dataclasses.dataclass(frozen=True)
class _Search:
    """A job, whatever the machine."""

    sizes: ModelSizes
    job: Job
    lengths: tuple[int, int]  # tokens of a prompt, of an answer
    rows: int
    methods: tuple[Method, ...]
    copies: int

    def on(self, machine: Machine, workers: tuple[int, Machine] | None = None) -> Fit | _Short:
        """Return the best way on a machine, or what is short in the one that needs the least.

        `workers`: engines and the machine of each, where they are given; 0: one, on the trainer's by turns.
        """
        shorts: list[_Short] = []
        none = _Short(math.inf, f"{', '.join(self.methods)}: not for {self.job}")
        # The trainer has half of devices that draw, too; or all of a host, by turns with an engine.
        shared = self.job == "rl" and workers is None and machine.count > 1 and machine.platform != "cpu"
        shares = [machine.count // 2, *[machine.count][machine.count > machine.host :]]
        # Publication makes a whole policy of floats, so that int8 numbers would save nothing in RL.
        methods: list[Method] = [one for one in self.methods if one != "int8 lora" or self.job != "rl"]
        for method, share in itertools.product(methods, shares if shared else [machine.count]):
            trainer = machine.text if share == machine.count else machine.part(share)
            if trainer is None:
                continue
            found = self._training(machine, trainer, share, method)
            if isinstance(found, Fit) and self.job == "rl":
                number, there = workers or (machine.count - share, machine)
                each = 1 if there.platform == "cpu" else there.count  # engines on CPUs have one device
                left = number * each if workers else number
                engines = self._engines(there, found, left, each if workers and number else None)
                found = engines if isinstance(engines, _Short) else dataclasses.replace(found, engines=engines)
            if isinstance(found, Fit):
                return found
            shorts.append(found)
        return min(shorts, key=lambda one: one.needed, default=none)

    def _training(self, machine: Machine, trainer: str, devices: int, method: Method) -> Fit | _Short:
        shorts = [_Short(math.inf, f"{self.rows} rows do not divide over {devices} devices")]
        packing = None
        if self.job == "rl" and machine.platform != "cpu":
            packing = (-(-self.lengths[0] // 512) * 512, -(-self.lengths[1] // _PACKED) * _PACKED)
            if self.rows * self.lengths[1] < devices * packing[1]:
                packing = None  # answers so short do not fill a packed row of each device
        for way, mesh, at_once, microbatches in self._ways(devices, method, packing):
            holds = training_bytes(self.sizes, way)
            if self.job == "rl":
                scored = self.rows * way.sharing // devices * sum(self.lengths)
                holds = max(holds, scoring_bytes(self.sizes, way, scored), key=lambda one: sum(one.values()))
            if sum(holds.values()) <= machine.memory:
                of_rows = self.rows, at_once, microbatches, "context" if way.keeps else "everything"
                return Fit(self.job, machine, trainer, method, mesh, *of_rows, packing, holds)
            why = f"{method} needs {arithmetic(holds)}, and a device has {gigabytes(machine.memory)} ({machine.source})"
            shorts.append(_Short(sum(holds.values()), why))
        return min(shorts, key=lambda one: one.needed)

    def _ways(
        self, devices: int, method: Method, packing: tuple[int, int] | None
    ) -> Iterator[tuple[TrainingWay, dict[str, int], int, int]]:
        """Yield ways, meshes, rows at a time and microbatches, the fastest first."""
        length = sum(packing or self.lengths)
        attended = attended_tokens(length) if packing else length
        filled = self.rows * self.lengths[1] // packing[1] if packing else self.rows
        for tensor, sequence in self._sharing(devices):
            groups = devices // (tensor * sequence)
            if self.rows % groups:
                continue
            each = -(-filled // groups)
            fewer = [n for n in range(each, 0, -1) if each % n == 0 and (n == 1 or n * length <= _AT_ONCE)]
            widths = dict.fromkeys((min(LARGE_FSDP, groups), groups))
            for fsdp, keeps, at_once in itertools.product(widths, (True, False), fewer):
                sizes = {"data": groups // fsdp, "fsdp": fsdp, "sequence": sequence, "tensor": tensor}
                mesh = {axis: size for axis, size in sizes.items() if size > 1} or {"fsdp": 1}
                of_rows = at_once * length, at_once * attended, keeps, each > at_once, self.copies
                yield (
                    TrainingWay(self.job, method, fsdp * tensor, tensor, sequence, *of_rows, copied=fsdp < groups),
                    mesh,
                    at_once,
                    each // at_once,
                )

    def _sharing(self, devices: int) -> list[tuple[int, int]]:
        """Return sizes of the axes whose devices share rows, tensor and sequence; the fewest devices first."""
        powers = [1 << n for n in range(devices.bit_length()) if devices % (1 << n) == 0]
        tensors = [n for n in powers if self.sizes.kv_heads % n == 0]
        # Devices of the sequence axis have two pieces of each row.
        sequences = [n for n in powers if n == 1 or (self.job == "sft" and sum(self.lengths) % (2 * n) == 0)]
        found = [(t, s) for t, s in itertools.product(tensors, sequences) if t * s <= devices]
        return sorted(found, key=lambda one: (math.prod(one), one[1]))

    def _engines(self, machine: Machine, training: Fit, left: int, each: int | None) -> Engines | _Short:
        """Return the engines, with so many devices `each`, on those that the trainer leaves, or on its own."""
        memory, longest = _COUNTED * machine.memory, sum(self.lengths) + 1
        counts = [each] if each else [1 << n for n in range(min(left or machine.count, machine.host).bit_length())]
        held = {} if left else {f"trainer's {name}": training.holds[name] for name in ("parameters", "moments")}
        shorts: list[_Short] = []
        for int8, count in itertools.product((False, True), counts if left else counts[::-1]):
            mesh, devices = self._engine_mesh(count), "trainer"
            if left:
                devices = machine.text if each else machine.part(count)
            if mesh is None or devices is None or (not left and count < machine.count and machine.platform != "cpu"):
                continue  # one engine has all of the trainer's devices
            workers = left // count if left else 1
            most = 1 << min(_SEQUENCES, max(1, self.rows // workers)).bit_length() - 1
            holds: Bytes = {}
            for sequences in (most >> n for n in range(most.bit_length()) if most >> n >= min(8, most)):
                holds = engine_bytes(self.sizes, count, int8=int8, tokens=sequences * longest) | held
                if sum(holds.values()) <= memory:
                    return Engines(devices, workers, mesh, sequences, int8, holds)
            said = f"an engine of {count} device{'s' * (count > 1)} needs {arithmetic(holds)}"
            shorts.append(_Short(sum(holds.values()), f"{said}, and a device has {gigabytes(memory)} for it"))
        return min(shorts, key=lambda one: one.needed) if shorts else self._no_engine(each or left or machine.count)

    def _engine_mesh(self, devices: int) -> dict[str, int] | None:
        return engine_mesh(self.sizes.kv_heads, self.sizes.experts, devices)

    def _no_engine(self, devices: int) -> _Short:
        counts = [n for n in range(devices, 0, -1) if devices % n == 0]
        most, mesh = next((n, mesh) for n in counts if (mesh := self._engine_mesh(n)) is not None)
        heads = f"{self.sizes.kv_heads} key/value heads do not divide over the {devices} devices of an engine"
        return _Short(math.inf, f"{heads}; expected workers of {most} each, with engine.mesh={mesh}")

    def alternatives(self, machine: Machine) -> list[str]:
        """Return what would fit, with its bytes: another method, fewer or shorter rows, more or other devices."""
        even = -(-self.rows // machine.count)
        batches = dict.fromkeys((-(-even >> n) or 1) * machine.count for n in range(8))
        lengths = [[-(-x // k) for x in self.lengths] for k in (2, 4, 8)]
        changes: list[list[tuple[str, dict[str, Any]]]] = [
            [(one, {"methods": (one,)}) for one in ADAPTED if one not in self.methods],
            [(f"a batch of {n} rows", {"rows": n}) for n in batches if n != self.rows],
            [(f"rows of {sum(n)} tokens", {"lengths": n}) for n in lengths],
        ]
        tried = [((text, self._changed(machine, edits)) for text, edits in kind) for kind in changes]
        ways, nothing = [way for kind in tried for way in _first(kind)], list[str]()
        if not ways:
            of = f"{machine.count} rows of {sum(lengths[-1])} tokens"
            least = self._changed(machine, {"methods": METHODS, "rows": machine.count, "lengths": lengths[-1]})
            if isinstance(least, Fit):
                ways = [_costing(f"{least.method} with {of}", least)]
            else:
                nothing = [f"fewer or shorter rows are not enough: of {of}, {least.why}"]
        known = machine.platform != "cpu" and not machine.text.startswith(f"{ANY_GPU}:")
        larger = (machine.part(machine.count << n) for n in range(1, 6)) if known else _PROPOSED
        return [*ways, *_first((text, self.on(find_machine(text))) for text in larger if text), *nothing]

    def _changed(self, machine: Machine, edits: dict[str, Any]) -> Fit | _Short:
        return dataclasses.replace(self, **edits).on(machine)


def _first(tried: Iterable[tuple[str, Fit | _Short]]) -> list[str]:
    """Return the first that fits, as text; nothing, if none does."""
    fits = (_costing(text, found) for text, found in tried if isinstance(found, Fit))
    return list(itertools.islice(fits, 1))


def _costing(text: str, found: Fit) -> str:
    return f"{text} ({gigabytes(sum(found.holds.values()))} of {gigabytes(found.machine.memory)} of a device)"
