"""Training slots: adapters of one base that are trained side by side, in programs that their rows share.

Nothing that a model computes depends on the others: a row has the same bits wherever it stands in a batch (see
row_programs.py), the gradients of a model's rows are added up in the order of its own passes, and steps are taken one
slot at a time. So a model trained among others has the weights that it would have had alone.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_like.config import ConfigBase
from axlearn_like.layers.base import Params, build_abstract, split
from axlearn_like.layers.parameter_names import path_name
from axlearn_like.layers.wrappers.adapters import Adapter, Factors, Matrix, check_fits, insert, matrices, padded
from axlearn_like.layers.wrappers.base import plain_config
from mesh import UserError
from mesh.errors import did_you_mean
from rl.serving.service.messages import AdamParams, LoraSpec, LossOutput, ServiceError, TrainPass
from rl.serving.service.row_batches import RowProgram, SlotLimits, WaitingRow, batches, filled, rows_of_pass
from rl.serving.service.row_programs import RowResults, SlotArrays, row_programs, settings_of
from rl.serving.service.saved import SlotState

PARTS = {"attention": "train_attention", "feed_forward": "train_mlp"}  # layers of a block, and fields of a spec


@dataclasses.dataclass
class _Model:
    slot: int
    spec: LoraSpec
    known: Mapping[str, Matrix]  # the matrices that it adapts
    step: int = 0


class TrainingSlots:
    """Adapters of one base, their gradients and their optimizers' moments.

    Attributes:
        known: matrices that can be adapted, by path.
        info: what is adapted and what not, as texts by name.
    """

    def __init__(self, model: ConfigBase[Any], params: Params, limits: SlotLimits, mesh: Mesh | None = None):
        """Take memory for all slots.

        Args:
            model: config of the base; its wrappers are not used.
            params: parameters of the plain model, which are read and never donated: others may use the same arrays.
            mesh: a mesh of one device, if the parameters lie on one.

        Raises:
            UserError: no matrix of the base can be adapted row by row, or the mesh has several devices.
        """
        if mesh is not None and mesh.size > 1:
            raise UserError(f"training slots: got a mesh of {mesh.size} devices; expected one device")
        self.limits, self._mesh = limits, mesh
        with self._on_mesh():
            built = build_abstract(plain_config(model))
            self.known: Mapping[str, Matrix] = {path: one for path, one in matrices(built) if part_of(path) in PARTS}
            if not self.known:
                raise UserError("training slots: no matrix of the base can be adapted row by row; expected a dense one")
            self.info = _described(built, self.known)
            self.vocab_size: int = built.vocab_size
            self._params, self._programs = params, row_programs(split(built)[0])
            self._models: dict[str, _Model] = {}
            self._arrays = SlotArrays(*(self._zeros(1 + limits.slots) for _ in SlotArrays._fields))

    # ---- models

    @property
    def models(self) -> tuple[str, ...]:
        """The models that have a slot."""
        return tuple(self._models)

    def create(self, model: str, spec: LoraSpec) -> None:
        """Give a model a slot: factors a uniform by its seed, as PEFT draws them, b zero (ServiceError: why not)."""
        if model in self._models:
            raise ServiceError(f"model {model!r} has a slot already")
        known = self._adapted(spec)
        factors: dict[str, Factors] = {}
        for path, one in known.items():
            rng = np.random.default_rng([spec.seed & (1 << 64) - 1, zlib.crc32(path.encode())])
            a = rng.uniform(-1, 1, (one.layers, one.inputs, spec.rank)) / np.sqrt(one.inputs)
            factors[path] = Factors(a.astype(np.float32), np.zeros((one.layers, spec.rank, one.outputs), np.float32))
        self._place(model, SlotState(spec, 0, factors), known)

    def unload(self, model: str) -> None:
        """Give a model's slot back (ServiceError: there is no such model)."""
        self._find(model)
        del self._models[model]

    def state(self, model: str) -> SlotState:
        """Return a copy of a model in host memory (ServiceError: there is no such model)."""
        found = self._find(model)
        with self._on_mesh():
            arrays: SlotArrays = jax.device_get(self._programs.read(self._arrays, np.int32(found.slot)))
        trees = [self._own(found, tree) for tree in arrays]
        factors, *others = trees
        gradients, first, second = (one if any(map(np.any, jax.tree.leaves(one))) else None for one in others)
        return SlotState(found.spec, found.step, factors, first, second, gradients)

    def restore(self, model: str, state: SlotState, *, optimizer: bool = True) -> None:
        """Let a model continue from a state; one that has no slot gets one.

        Args:
            state: as `state` returns it.
            optimizer: with moments, number of steps and gradients, too; False: they are zero.

        Raises:
            ServiceError: no slot is free, the model has a slot of another rank or other matrices, or the state does
                not fit this base.
        """
        known = self._adapted(state.spec)
        if (held := self._models.get(model)) is not None and dataclasses.replace(
            held.spec, seed=state.spec.seed
        ) != state.spec:
            raise ServiceError(f"model {model!r} is {held.spec}, the state is {state.spec}; expected one for the other")
        if set(known) != set(state.factors):
            raise ServiceError(f"the state adapts {', '.join(sorted(state.factors))}; expected {', '.join(known)}")
        for part in (state.factors, state.first, state.second, state.gradients):
            try:
                check_fits(Adapter(part or {}), known, state.spec.rank) if part else None
            except UserError as error:
                raise ServiceError(f"the state does not fit this base: {error}") from None
        if not optimizer:
            state = dataclasses.replace(state, step=0, first=None, second=None, gradients=None)
        self._place(model, state, known)

    # ---- training

    def check(self, request: TrainPass | AdamParams) -> None:
        """Refuse a pass or a step that cannot be run (ServiceError), from any thread."""
        if isinstance(request, TrainPass):
            rows_of_pass(0, request, self.limits, self.vocab_size)
        else:
            _check_adam(request)

    def forward_backward(self, passes: Sequence[TrainPass]) -> list[LossOutput]:
        """Run passes of several models together, those of a model in order; `check` has seen them."""
        waiting: list[list[WaitingRow]] = []
        for index, job in enumerate(passes):
            self._find(job.model)
            waiting.append(rows_of_pass(index, job, self.limits, self.vocab_size))
        found: dict[tuple[int, int], tuple[np.ndarray, float]] = {}
        for program, rows in batches(waiting, self.rows_of):
            results = self._run(program, rows)
            logprobs = results.chosen.logprobs()
            for place, row in enumerate(rows):
                own = logprobs[place][tuple(map(slice, row.arrays["target_tokens"].shape))]
                found[row.index, row.row] = own, float(results.losses[place])

        def output(index: int, job: TrainPass) -> LossOutput:
            own = [found[index, row] for row in range(len(job.rows))]
            return LossOutput(tuple(row for row, _ in own), {"loss:sum": float(sum(loss for _, loss in own))})

        return [output(index, job) for index, job in enumerate(passes)]

    def optim_step(self, model: str, adam: AdamParams) -> dict[str, float]:
        """Step by a model's gradients, which are zero after it, with what `check` has seen, and return metrics.

        Raises:
            ServiceError: there is no such model, or the gradients are not all numbers: they are then zero, and nothing
                else has changed.
        """
        found = self._find(model)
        norm = self._step(found.slot, adam, found.step + 1)
        if not np.isfinite(norm):
            raise ServiceError(
                f"model {model!r}: the norm of its gradient is {norm}; the gradient was dropped and no step taken"
            )
        found.step += 1
        return {"grad_norm": norm, "step": float(found.step)}

    def compilations(self) -> list[Callable[[], Any]]:
        """Return functions that compile what steps and passes need, short rows first; they change no model."""
        longest = self.limits.length(self.limits.context_length)
        lengths = [1 << bit for bit in range(longest.bit_length()) if self.limits.shortest <= 1 << bit <= longest]
        passes = [partial(self._run, RowProgram(length, False), ()) for length in lengths]
        return [passes[0], partial(self._step, 0, AdamParams(0.0), 1), *passes[1:]]

    # ---- rows and programs

    def rows_of(self, length: int) -> int:
        """Return the rows of a program of this length: always as many, however few there are to compute."""
        each = 4 * self.limits.rank * sum(one.layers * (one.inputs + one.outputs) for one in self.known.values())
        return max(1, min(self.limits.tokens // length, self.limits.gradient_bytes // each))

    def _run(self, program: RowProgram, rows: Sequence[WaitingRow]) -> RowResults:
        own = [self._models[row.job.model] for row in rows]
        slots = [(one.slot, self.limits.alpha / one.spec.rank) for one in own]
        batch = filled(rows, program, self.rows_of(program.length), slots)
        with self._on_mesh():
            if program.forward_only:
                results = self._programs.forward(self._params, self._arrays.factors, batch)
            else:
                gradients, results = self._programs.forward_backward(
                    self._params, self._arrays.factors, self._arrays.gradients, batch
                )
                self._arrays = self._arrays._replace(gradients=gradients)
            return jax.device_get(results)

    def _step(self, slot: int, adam: AdamParams, number: int) -> float:
        """Step a slot, and return the norm of its gradient."""
        with self._on_mesh():
            self._arrays, norm = self._programs.step(self._arrays, np.int32(slot), settings_of(adam, number))
            return float(norm)

    # ---- slots

    def _find(self, model: str) -> _Model:
        if model not in self._models:
            raise ServiceError(f"no model {model!r} has a slot{did_you_mean(model, self._models)}")
        return self._models[model]

    def _adapted(self, spec: LoraSpec) -> dict[str, Matrix]:
        """Return the matrices that a spec adapts (ServiceError: its rank is too large, or it adapts none)."""
        if not 1 <= spec.rank <= self.limits.rank:
            raise ServiceError(f"rank: got {spec.rank}; expected 1 to {self.limits.rank}, the largest of this service")
        chosen = {path: one for path, one in self.known.items() if getattr(spec, PARTS[part_of(path)])}
        if not chosen:
            raise ServiceError(
                f"train_attention={spec.train_attention}, train_mlp={spec.train_mlp}: nothing is adapted; this base "
                f"has {self.info['adapted']}; {self.info['left out']}"
            )
        return chosen

    def _place(self, model: str, state: SlotState, known: Mapping[str, Matrix]) -> None:
        """Write a state into the slot of its model, or into a free one."""
        if (held := self._models.get(model)) is not None:
            slot = held.slot
        else:
            taken = {one.slot for one in self._models.values()}
            slot = next((one for one in range(1, 1 + self.limits.slots) if one not in taken), None)
            if slot is None:
                raise ServiceError(
                    f"all {self.limits.slots} slots have a model; unload one, or start the service with more slots"
                )
        parts = (state.factors, state.gradients, state.first, state.second)
        arrays = SlotArrays(*(padded(Adapter(part or {}), self.known, self.limits.rank) for part in parts))
        with self._on_mesh():
            self._arrays = self._programs.write(self._arrays, arrays, np.int32(slot))
        self._models[model] = _Model(slot, state.spec, known, state.step)

    def _own(self, model: _Model, tree: Any) -> dict[str, Factors]:
        """Return the arrays of a model in its own rank, by path."""
        rank, found = model.spec.rank, {}
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, Factors))
        for path, (a, b) in leaves:
            if path_name(path) in model.known:
                found[path_name(path)] = Factors(np.ascontiguousarray(a[..., :rank]), np.ascontiguousarray(b[:, :rank]))
        return found

    def _zeros(self, slots: int) -> Params:
        tree: Params = {}
        where = None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())
        for path, one in self.known.items():
            shapes = ((one.inputs, self.limits.rank), (self.limits.rank, one.outputs))
            insert(tree, path, Factors(*(jnp.zeros((one.layers, slots, *shape), device=where) for shape in shapes)))
        return tree

    def _on_mesh(self) -> Any:
        return nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)


def part_of(path: str) -> str:
    """Return the layer of a block that a matrix belongs to: `layers/attention/q_dkqh` -> `attention`; "": another."""
    return next((name for name in path.split("/") if name in PARTS), "")


def _described(model: Any, known: Mapping[str, Matrix]) -> dict[str, str]:
    left = ["the embedding and the head, which rows do not multiply with one by one (train_unembed)"]
    if model.has_experts:
        left.append("experts, which tokens of all rows share")
    return {"adapted": ", ".join(known), "left out": f"not adapted: {'; '.join(left)}"}


def _check_adam(adam: AdamParams) -> None:
    for field in dataclasses.fields(adam):
        value = getattr(adam, field.name)
        below = 1.0 if field.name.startswith("beta") else np.inf
        if not 0 <= value < below:
            limit = "0 or more, below 1" if below == 1 else "a number, 0 or more"
            raise ServiceError(f"{field.name}: got {value}; expected {limit}")
