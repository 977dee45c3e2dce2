"""The policy trainer: takes whole batches from the controller, updates, publishes.

Order of things, so that a trainer may die between any two of them: publish version s, take batch s, update, mark batch
s as consumed, publish s + 1, save. After a restart the restored version is published *before* data is asked for.
Publishing runs on a thread beside all else; an update waits only until the weights it will overwrite have been copied.

It may be several processes that share one mesh. All run this code; the first, the leader, decides what is next and
speaks for all with the controller and in the log. What each does by itself is to push its own part of the weights.
"""

import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import REQUIRED, ConfigBase, Configurable, errors_at
from axlearn_like.layers.base import Params, bind, split
from axlearn_like.learner import Learner
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog, span
from axlearn_like.run.metrics import MetricsWriter
from axlearn_like.training.step import init_state, make_train_step
from mesh import UserError, make_mesh, shard_batch, to_named_sharding
from mesh.distributed import ProcessGroup, to_host
from mesh.mesh import PlaceholderDevice
from mesh.rules import batch_axes
from rl.objective import Objective
from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.push.coordinated import CoordinatedPush
from rl.parameter_server.push.publisher import Publisher
from rl.parameter_server.push.snapshot import Snapshot
from rl.roles.messages import Group
from rl.roles.protocols import BatchSource
from rl.training.batching import Batch, digest_of_groups, pack_groups
from rl.training.logprobs import pack_rows
from rl.training.program import make_policy_loss, make_score_rows, policy_logprobs

_BATCH_AGAIN = 2.0  # seconds for a batch that another process has got already


class PolicyTrainer(Configurable):
    """One update a batch, on a named mesh."""

    class Config(ConfigBase["PolicyTrainer"]):
        model: ConfigBase = REQUIRED
        objective: Objective.Config = REQUIRED
        learner: Learner.Config = REQUIRED
        checkpoint: Checkpointer.Config = Checkpointer.Config()
        mesh: dict[str, int] = {}  # over the devices of all processes
        slices: dict[str, int] = {}  # axis -> the factor of its size over slices; empty: all go over the first axis
        processes: int = 1  # that share the mesh: an actor each, on a host each if there are several
        microbatches: int = 1
        num_steps: int = REQUIRED
        staleness: int = REQUIRED  # versions behind the current one that workers may still ask for
        max_prompt: int = REQUIRED
        max_new: int = REQUIRED
        temperature: float = REQUIRED  # of the behaviour policy; the trainer scores under the same
        row_multiple: int = 1  # batches are padded to a multiple of this many rows
        samples_per_row: int | None = None  # of a prompt, which is computed again for every row; None: all in one row
        chunks: int = 1  # parts into which a row's tokens are cut for the head; logits of one part exist at a time
        compiler_options: dict[str, str] = {}  # of XLA, for the update
        logprob_diff_every: int = 10  # updates between comparisons of trainer and sampler log-probabilities

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
            axes = batch_axes()
            rows = math.prod(mesh.shape[axis] for axis in axes) * self.microbatches
            if self.row_multiple % rows:
                raise UserError(
                    f"trainer.row_multiple={self.row_multiple} is not a multiple of "
                    f"{' x '.join(axes)} x microbatches = {rows}"
                )

        def check_model(self, mesh: Mesh) -> None:
            """Refuse layers that do not divide over the mesh, by their paths (UserError)."""
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), errors_at("policy", self.model):
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
        """`initial(abstract_params)` gives version 0; without it the model's own initialisation does.

        `processes`: those that are this trainer together, of which this is one.
        """
        self.cfg, self._controller = cfg, controller
        self._all = processes or ProcessGroup("trainer")
        self._versions, self._publisher = weights.directory, self._make_publisher(weights)
        self._own_events = EventLog(run.events_path)
        self._events = EventLog(run.events_path, silent=not self._all.leader)
        self._mesh = cfg.check_sizes()
        self._objective = cfg.objective.build()
        if not self._objective.single_update and self._objective.needs_old:
            raise UserError(
                "trainer.objective.old_policy='recompute' needs a second scoring pass, which one update a batch "
                "makes superfluous; use 'current' (the same, exactly) or 'behaviour'"
            )
        self._checkpointer = cfg.checkpoint.build(directory=run.checkpoints / "rl")
        self._learner = cfg.learner.build()
        self._recent: list[Snapshot] = []  # the `staleness` versions before the current one
        self._push: CoordinatedPush | None = None  # of the current one
        self._saving: set[int] = set()  # steps whose checkpoints may still be on their way to the disk
        with jax.set_mesh(self._mesh):
            abstract = jax.eval_shape(lambda: cfg.model.build(rngs=nnx.Rngs(0)))
            self._graphdef, _ = split(abstract)
            loss = make_policy_loss(self._graphdef, self._objective, cfg.temperature, cfg.microbatches, cfg.chunks)
            self._score = jax.jit(self._logprobs)
            self._score_rows = make_score_rows(self._graphdef, cfg.chunks)
            self.state, self.step = self._restore_or_start(initial, seed)
            self._step = make_train_step(
                *(loss, self._learner, cfg.microbatches), like=self.state, compiler_options=cfg.compiler_options
            )
        self._wait_began: float | None = None
        self._metrics = MetricsWriter(run.path, phase="rl", resume_step=self.step, silent=not self._all.leader)

    # ---- the loop

    def start(self) -> None:
        """Publish the current version and those that workers may still need; only then ask for data."""
        self.settle()
        if self._all.leader:
            self._versions.rewind(self.step)
        self._all.barrier()
        for snapshot in self._recent:
            CoordinatedPush(self._publisher.republish(snapshot), self._publisher, self._all).settle()
        self._publish()
        self.settle()
        if self._all.leader:
            self._controller.begin(self.step, self._first_version())

    def run(self, stop: Callable[[], bool] = lambda: False) -> int:
        """Update until the last step or until `stop()` in any of the processes; saves at the end.

        Returns the steps completed.
        """
        self.start()
        while self.step < self.cfg.num_steps and not self._all.any(stop()):
            self.run_once(timeout=1.0)
        self.close()
        return self.step

    def run_once(self, timeout: float = 0.0) -> bool:
        """One update; False if its batch did not become complete within `timeout` seconds."""
        began = self._wait_began = self._wait_began or time.monotonic()
        groups = self._next_batch(timeout)
        if groups is None:
            self._heal()
            return False
        waited, self._wait_began = time.monotonic() - began, None
        what = {"for": f"batch {self.step}"}
        self._events.append("trainer", "wait", seconds=round(waited, 4), step=self.step, **what)
        began = time.monotonic()
        current = self._copied()
        with span(self._events, "trainer", "update", step=self.step), jax.set_mesh(self._mesh):
            metrics = self._update(groups)
        if self._all.leader:
            self._controller.consumed(self.step)
        self.step += 1
        self._recent = [*self._recent, current][1 if len(self._recent) == self.cfg.staleness else 0 :]
        self._publish()
        seconds = time.monotonic() - began
        times = {"wait_seconds": waited, "step_seconds": waited + seconds, "version": self.step}
        self._metrics.write(self.step, {**metrics, **times})
        if self._checkpointer.should_save(self.step):
            self.save()
        else:
            self._checkpointer.check()  # a full disk is told now, not when the next one is due
        self._tell_saved()
        return True

    def save(self) -> None:
        """Checkpoint the state, the versions still in use, and the controller's whole state: the step."""
        recent = [snapshot.params(self.state["params"]) for snapshot in self._recent]
        versions = [snapshot.version for snapshot in self._recent]
        missing = self.cfg.staleness - len(recent)  # of a young run; the tree has one form always
        recent += [self.state["params"]] * missing
        state = {**self.state, "recent": {str(i): params for i, params in enumerate(recent)}}
        with jax.set_mesh(self._mesh):
            self._checkpointer.save(self.step, state, {"step": self.step, "versions": versions})
        self._saving.add(self.step)

    def _tell_saved(self) -> None:
        """Of checkpoints that are on disk by now."""
        if not self._saving:
            return
        for step in self._saving.intersection(self._checkpointer.steps()):
            self._saving.remove(step)
            self._events.append("trainer", "saved", step=step)

    def close(self) -> None:
        """Save, and wait until it is on disk."""
        self.settle()
        self.save()
        self._checkpointer.close()
        self._tell_saved()
        self._metrics.close()
        self._all.barrier()  # who ends now takes nothing from the others

    # ---- parts

    def _make_publisher(self, weights: ParameterServerClient) -> Publisher:
        pusher = self._all.broadcast(secrets.token_hex(8))  # of this start
        return weights.publisher(pusher=pusher, process=self._all.index, processes=self._all.count)

    def _next_batch(self, timeout: float) -> list[Group] | None:
        """The batch of this step, the same in all processes; None if it is not complete within `timeout` seconds, or
        one of them has not got it (the controller may have died after it gave it to others).
        """
        if self._all.count == 1:
            return self._controller.next_batch(self.step, timeout)
        groups = self._controller.next_batch(self.step, timeout) if self._all.leader else None
        digest = self._all.broadcast(None if groups is None else digest_of_groups(groups))
        if digest is None:
            return None
        if not self._all.leader:
            groups = self._controller.next_batch(self.step, _BATCH_AGAIN)
        lacking = groups is None or digest_of_groups(groups) != digest
        return None if self._all.any(lacking) else groups

    def _restore_or_start(self, initial: Callable[[Any], Params] | None, seed: int) -> tuple[dict[str, Any], int]:
        def create(key: jax.Array) -> dict[str, Any]:
            params = split(self.cfg.model.build(rngs=nnx.Rngs(key)))[1]
            return init_state(params, self._learner)

        key = jax.random.key(seed)
        abstract = to_named_sharding(jax.eval_shape(create, key), self._mesh)
        abstract["opt_state"] = self._learner.placed(abstract["opt_state"])
        latest = self._all.broadcast(self._checkpointer.latest_step())
        if latest is not None:
            copies = {str(i): abstract["params"] for i in range(self.cfg.staleness)}
            state, extras = self._checkpointer.restore({**abstract, "recent": copies}, latest)
            recent = state.pop("recent")
            versions = enumerate(extras["versions"])
            self._recent = [self._publisher.copy(recent[str(i)], version) for i, version in versions]
            return state, extras["step"]
        state = jax.jit(create)(key)
        if initial is not None:
            state["params"] = initial(abstract["params"])
        return state, 0

    def _update(self, groups: list[Group]) -> dict[str, float]:
        batch, figures = pack_groups(
            groups,
            self._objective,
            max_prompt=self.cfg.max_prompt,
            max_new=self.cfg.max_new,
            row_multiple=self.cfg.row_multiple,
            samples_per_row=self.cfg.samples_per_row,
        )
        ages = [self.step - int(r.versions.min()) for g in groups for r in g.rollouts]
        arrays = shard_batch(batch)
        if self.step % self.cfg.logprob_diff_every == 0:
            figures |= self._agreement(groups, batch, arrays)
        self.state, metrics = self._step(self.state, arrays)
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        metrics["drift_mean"] = metrics.pop("logprob_diff_mean")
        metrics["drift_max"] = metrics.pop("logprob_diff_max")
        live = batch["action_mask"][batch["weights"].any(axis=(1, 2))]
        figures["train_tokens"] = float(live.sum() + batch["trunk_lengths"].sum())
        return {**figures, **metrics, "staleness_mean": np.mean(ages), "staleness_max": max(ages)}

    def _logprobs(self, params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
        model = bind(self._graphdef, params)
        return policy_logprobs(model, batch, self.cfg.temperature, self.cfg.chunks).logprobs

    def _agreement(self, groups: list[Group], batch: Batch, arrays: dict[str, jax.Array]) -> dict[str, float]:
        """|trainer - sampler| log-probabilities of the batch under the *same* version of the weights.

        `logprob_diff`: by the forward pass of the update; `scoring_diff`: by that of `rl.training.logprobs`, which
        sums in the engine's order.
        """
        versions = {int(v) for group in groups for r in group.rollouts for v in r.versions}
        if len(versions) != 1:
            return {}  # drawn by a mixture of versions: no single forward pass can be compared
        version = versions.pop()
        params = self.state["params"]
        if version != self.step:
            params = next(one for one in self._recent if one.version == version).params(params)
        figures: dict[str, float] = {}
        if batch["action_mask"].any():
            apart = np.abs(to_host(self._score(params, arrays)) - batch["logprobs_behaviour"])
            apart = apart[batch["action_mask"]]
            figures |= {"logprob_diff_mean": float(apart.mean()), "logprob_diff_max": float(apart.max())}
        apart = np.abs(np.concatenate(self._scoring_differences(groups, params)))
        return {**figures, "scoring_diff_mean": float(apart.mean()), "scoring_diff_max": float(apart.max())}

    def _scoring_differences(self, groups: list[Group], params: Params) -> list[np.ndarray]:
        sizes = {"max_prompt": self.cfg.max_prompt, "max_new": self.cfg.max_new}
        rows = pack_rows(groups, **sizes, row_multiple=self.cfg.row_multiple)
        arrays = shard_batch({name: rows[name] for name in ("tokens", "targets")})
        temperature = jnp.full(1, self.cfg.temperature, jnp.float32)
        scored = jax.tree.map(to_host, self._score_rows(params, **arrays, temperature=temperature)).logprobs()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return [
            (scored[row, first : first + len(r.tokens)] - r.logprobs)[r.action_mask]
            for row, (first, r) in enumerate(zip(rows["first"], rollouts, strict=True))
        ]

    def settle(self) -> None:
        """Wait until the current version can be pulled; raises what went wrong with it."""
        if self._push is not None:
            self._push.settle()

    def _publish(self) -> None:
        self.settle()  # at most one is under way
        version, began = self.step, time.monotonic()

        def published(snapshot: Snapshot) -> None:
            seconds = round(time.monotonic() - began, 4)
            what = {"version": version, "nbytes": snapshot.nbytes, "checksum": snapshot.checksum}
            self._own_events.append(self._all.name, "push", seconds=seconds, **what)
            if self._all.leader:
                self._controller.published(version)

        with jax.set_mesh(self._mesh):
            push = self._publisher.publish_async(self.state["params"], version, published)
        self._push = CoordinatedPush(push, self._publisher, self._all)

    def _copied(self) -> Snapshot:
        """The current version on the host: then the next update may overwrite it."""
        assert self._push is not None, "start() publishes before any update"
        return self._push.snapshot()

    def _heal(self) -> None:
        """A parameter server or controller that restarted is empty: tell it where we are."""
        settled = self._push is not None and self._push.settled()
        if settled and self._all.broadcast(self._all.leader and self._forgotten()):
            self._events.append("trainer", "heal", step=self.step)
            self.start()

    def _forgotten(self) -> bool:
        """Whether the parameter server or the controller lacks what they have had from us."""
        lacking = {*(snapshot.version for snapshot in self._recent), self.step}.difference(self._versions.versions())
        return bool(lacking) or self._controller.status()["version"] < self.step

    def _first_version(self) -> int:
        return self._recent[0].version if self._recent else self.step
