"""The policy trainer: takes whole batches from the controller, updates, publishes.

The order of things, so that a trainer may die between any two of them: publish version s, take batch s, update, mark
batch s as consumed, publish s + 1, save. After a restart the restored version is published *before* data is asked for.

It may be several processes that share one mesh. All run this code; the first, the leader, decides what is next and
speaks for all with the controller and in the log. Each pushes its own part of the weights.
"""

import math
import os
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from axlearn_like.config import REQUIRED, Configurable, errors_at
from axlearn_like.layers.base import Params
from axlearn_like.learner import Learner
from axlearn_like.operations.utilisation import row_flops
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.training.losses import SupervisedLoss
from axlearn_like.training.program import Program, check_length
from axlearn_like.training.session import Session, TrainingConfig
from axlearn_like.training.step import State
from mesh import UserError, make_mesh
from mesh.distributed import ProcessGroup
from mesh.mesh import PlaceholderDevice
from mesh.rules import mesh_axes, use_mesh, use_rules
from rl.objective import Objective
from rl.parameter_server.client import ParameterServerClient
from rl.roles.protocols import BatchSource
from rl.training.feed import PolicyFeed
from rl.training.logprob_diff import LogprobDiff
from rl.training.program import Described, describe_batch, describe_rows, policy_program
from rl.training.publication import Publication


class PolicyTrainer(Configurable):
    """One update a batch, on a named mesh, in the loop and with the operations of supervised training."""

    class Config(TrainingConfig["PolicyTrainer"]):
        objective: Objective.Config = REQUIRED
        processes: int = 1  # that share the mesh: an actor each, on a host each if there are several
        staleness: int = REQUIRED  # versions behind the current one that workers may still ask for
        max_prompt: int = REQUIRED
        max_new: int = REQUIRED
        temperature: float = REQUIRED  # of the behaviour policy; the trainer scores under the same
        row_multiple: int = 1  # batches are padded to a multiple of this many rows
        samples_per_row: int | None = None  # of a prompt, which is computed again for every row; None: all in one row
        chunks: int = 1  # parts into which a row's tokens are cut for the head; logits of one part exist at a time
        logprob_diff_every: int = 10  # updates between comparisons of trainer and sampler log-probabilities
        log_every: int = 1

        def program(self, mesh: Mesh, learner: Learner | None = None) -> Program:
            """Return the update on a mesh; the learner is built unless it is given (UserError: it does not fit)."""
            self.check_rows(mesh)
            check_length(self.model, self.max_prompt + self.max_new, "max_prompt + max_new", "policy")
            objective, learner = self.objective.build(), learner or self.learner.build()
            settings: dict[str, Any] = {
                "temperature": self.temperature,
                "microbatches": self.microbatches,
                "chunks": self.chunks,
                "compiler_options": self.compiler_options,
            }
            with use_rules(self.axis_rules):
                return policy_program(self.model, objective, learner, mesh, **settings)

        def batch(self, mesh: Mesh, *, groups: int, samples: int) -> Described:
            """Return the arrays of an update by `samples` rollouts of `groups` prompts, all with a gradient."""
            sizes: dict[str, Any] = {**self.sizes(), "samples_per_row": self.samples_per_row}
            with use_mesh(mesh, self.axis_rules):
                return describe_batch(self.objective.build(), mesh, groups=groups, samples=samples, **sizes)

        def rows(self, mesh: Mesh, *, groups: int, samples: int) -> Described:
            """Return the arguments of scoring as many rollouts."""
            with use_mesh(mesh, self.axis_rules):
                return describe_rows(mesh, rollouts=groups * samples, **self.sizes())

        def sizes(self) -> dict[str, int]:
            return {"max_prompt": self.max_prompt, "max_new": self.max_new, "row_multiple": self.row_multiple}

        def check(self) -> None:
            """Refuse a mesh, batches or a model that do not fit each other, as far as it can be known here.

            Raises:
                UserError: names the field that does not fit.
            """
            if self.processes != 1:
                self.check_processes()
            elif not os.environ.get("RAY_ADDRESS"):  # else the devices are those of other machines
                self.check_sizes()

        def check_sizes(self) -> Mesh:
            """The mesh, if it fits the devices, and batches and model fit it.

            Raises:
                UserError: naming the field that does not fit.
            """
            mesh = make_mesh(self.mesh, slices=self.slices)
            self.check_rows(mesh)
            self.check_model(mesh)
            return mesh

        def check_processes(self) -> None:
            """The same as far as it can be known where the devices of several processes are not seen.

            Raises:
                UserError: naming the field that does not fit.
            """
            if self.processes < 1:
                raise UserError(f"trainer.processes={self.processes}; expected 1 or more")
            if not self.mesh:
                raise UserError(
                    f"trainer.processes={self.processes} share a mesh, but trainer.mesh is empty; "
                    f"expected e.g. {{'fsdp': {self.processes}}}"
                )
            if -1 in self.mesh.values():
                return  # of how many devices is known in the trainer only
            total = math.prod(self.mesh.values())
            if total % self.processes:
                raise UserError(
                    f"trainer.mesh={self.mesh} has {total} devices, which do not divide over "
                    f"trainer.processes={self.processes}"
                )
            mesh = make_mesh(self.mesh, [PlaceholderDevice()] * total, slices=self.slices)
            self.check_rows(mesh)
            self.check_model(mesh)

        def check_rows(self, mesh: Mesh) -> None:
            """Refuse batches that do not divide over the mesh and into microbatches (UserError)."""
            axes = mesh_axes("batch", self.axis_rules)
            rows = math.prod(mesh.shape[axis] for axis in axes) * self.microbatches
            if self.row_multiple % rows:
                raise UserError(
                    f"trainer.row_multiple={self.row_multiple} is not a multiple of "
                    f"{' x '.join(axes)} x microbatches = {rows}"
                )

        def check_model(self, mesh: Mesh) -> None:
            """Refuse layers that do not divide over the mesh, by their paths (UserError)."""
            abstract = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
            with use_rules(self.axis_rules), abstract, errors_at("policy", self.model):
                jax.eval_shape(lambda: self.model.build(rngs=nnx.Rngs(0)))

    def __init__(
        self,
        cfg: Config,
        *,
        run: RunDirectory,
        controller: BatchSource,
        weights: ParameterServerClient,
        initial: Callable[[Any], Params] | None = None,
        seed: int = 0,
        processes: ProcessGroup | None = None,
    ):
        """Restore the newest checkpoint, or start.

        Args:
            cfg: of the trainer, as the experiment has completed it.
            run: open.
            controller: source of batches.
            weights: access to the parameter server.
            initial: maps abstract parameters to version 0; None: the model's own initialisation.
            seed: of that initialisation.
            processes: of this trainer; None: this one alone.
        """
        cfg.check_counts()
        self.cfg, self._group = cfg, processes or ProcessGroup("trainer")
        self._mesh, objective = cfg.check_sizes(), cfg.objective.build()
        if not objective.single_update and objective.needs_old:
            raise UserError(
                "trainer.objective.old_policy='recompute' needs a second scoring pass, which one update a batch "
                "makes superfluous; use 'current' (the same, exactly) or 'behaviour'"
            )
        learner, group = cfg.learner.build(), self._group
        where: dict[str, Any] = {"phase": "rl", "checkpoints": run.checkpoints / "rl"}
        config_text = run.config_path.read_text() if run.config_path.exists() else ""
        with use_mesh(self._mesh, self.cfg.axis_rules):
            self._session = Session(cfg, run, self._mesh, group, **where, config_text=config_text)
            program = cfg.program(self._mesh, learner)
            pushes = EventLog(run.events_path)
            self._publication = Publication(weights, controller, group, pushes, staleness=cfg.staleness)
            also = {"recent": self._publication.describe(program.state["params"])}
            state, step, extras = self._session.restore_or_start(program, learner, seed=seed, params=initial, also=also)
            if extras is not None:
                self._publication.restore(state.pop("recent"), extras["versions"])
            sizes = cfg.sizes()
            self.diff = LogprobDiff(program.graphdef, temperature=cfg.temperature, chunks=cfg.chunks, **sizes)
            feed = PolicyFeed(
                *(controller, self._publication, objective, self.diff, group, self._session.events),
                diff_every=cfg.logprob_diff_every,
                sizes={**sizes, "samples_per_row": cfg.samples_per_row},
                flops=partial(row_flops, cfg.model) if self._session.peak else lambda *sizes: None,
            )
            loss = SupervisedLoss.Config(chunks=cfg.chunks).build()  # of evaluators on supervised data
            self._loop = self._session.loop(state, step, program, feed, learner, loss)

    @property
    def state(self) -> State:
        """The train state."""
        return self._loop.state

    @property
    def step(self) -> int:
        """Completed updates, which is the version of the weights."""
        return self._loop.step

    def start(self) -> None:
        """Publish the current version and those that workers may still need; only then ask for data."""
        with use_mesh(self._mesh, self.cfg.axis_rules):
            self._publication.start(self.step, self.state["params"])
            self._session.clock.to("input")  # the first batch is awaited

    def run(self, stop: Callable[[], bool] = lambda: False) -> int:
        """Update until the last step or until `stop()` in any of the processes; save at the end.

        Returns the steps completed.
        """
        with self:
            self.start()
            with use_mesh(self._mesh, self.cfg.axis_rules):
                self._loop.run(lambda: self._group.any(stop()))
            self._end()
        self._group.barrier()  # a process that ends now takes nothing from the others
        return self.step

    def run_once(self, timeout: float = 0.0) -> bool:
        """Make one update; False if its batch did not become complete within `timeout` seconds."""
        with use_mesh(self._mesh, self.cfg.axis_rules):
            return self._loop.advance(timeout)

    def settle(self) -> None:
        """Wait until the current version can be pulled; raises what went wrong with it."""
        self._publication.settle()

    def save(self) -> None:
        """Start to write a checkpoint of the last update."""
        with use_mesh(self._mesh, self.cfg.axis_rules):
            self._loop.save()

    def close(self) -> None:
        """Save, wait until it is on disk, and end the session."""
        with self:
            self.save()
            self._end()

    def __enter__(self) -> "PolicyTrainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the operations; nothing is saved."""
        self._session.__exit__(kind, error, trace)

    def _end(self) -> None:
        self.settle()
        with self._session.clock.spending("checkpoint"):
            self._session.tiers.wait()
        self._session.end(self.step, "done" if self.step >= self.cfg.num_steps else "stop requested")
