"""One RL experiment as a config, and the construction of each role from it.

The experiment gives every component what only it knows (sizes, seeds, the task mixture); components never read their
parent. A runtime calls the `make_*` methods in the process where a role will run: this one, or an actor's.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
from flax import nnx

from axlearn_like.checkpoint.checkpointer import restore_params
from axlearn_like.config import REQUIRED, ConfigBase, Configurable, MeshRules
from axlearn_like.layers.base import Params, split
from axlearn_like.learner import Learner
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.tokenizers.protocol import Tokenizer
from axlearn_like.training.program import check_length
from axlearn_like.training.programs import Tuning
from axlearn_like.training.trainer import Trainer, resolve_model
from mesh import UserError, to_named_sharding
from mesh.cost.program import Programs
from mesh.distributed import ProcessGroup
from rl.controller.controller import Controller
from rl.evaluation.evaluator import Evaluation
from rl.objective import Objective
from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.pull.prefetcher import Prefetcher
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.shard_server import ShardServer
from rl.programs import experiment_programs, experiment_tuning
from rl.roles.protocols import BatchSource, LeaseSource, ScoreSource
from rl.roles.timeouts import Timeouts
from rl.rollout.engine import RolloutEngine
from rl.rollout.sampling import Sampler, plain
from rl.rollout.worker import RolloutWorker
from rl.tasks.prompts import check_prompts
from rl.training.program import padded
from rl.training.trainer import PolicyTrainer
from rl.verification.service import Verifier

Runtime = Literal["inprocess", "ray"]
# Lease ids of one controller process; so a lease is never confused with one of the next incarnation.
LEASES_PER_INCARNATION = 1_000_000_000


class RLExperiment(Configurable):
    """A policy, tasks, an objective, and the sizes of one update."""

    class Config(ConfigBase["RLExperiment"]):
        policy: ConfigBase = REQUIRED
        tokenizer: ConfigBase = ByteTokenizer.Config()
        tasks: ConfigBase = REQUIRED
        max_prompt: int = REQUIRED  # tokens
        max_new: int = REQUIRED  # tokens, the stop token included
        stop_at_eos: bool = True

        num_steps: int = REQUIRED  # updates
        groups: int = REQUIRED  # prompts in a batch
        samples: int = REQUIRED  # rollouts of each prompt
        groups_per_lease: int | None = None  # prompts that a worker leases at a time; None: a whole batch
        staleness: int = 0  # versions that a rollout may be behind the trainer
        seed: int = 0

        warm_start: Trainer.Config | None = None  # supervised fine-tuning first; None: from scratch
        objective: Objective.Config = Objective.Config(old_policy="current")
        learner: Learner.Config = REQUIRED
        sampler: Sampler.Config = Sampler.Config()
        trainer: PolicyTrainer.Config = PolicyTrainer.Config()
        controller: Controller.Config = Controller.Config()
        engine: RolloutEngine.Config = RolloutEngine.Config(keep_completions=False)
        parameter_server: ParameterServer.Config = ParameterServer.Config()
        verifier: ConfigBase = REQUIRED  # Verifier, or InlineVerifier for trusted functions
        evaluation: Evaluation.Config | None = Evaluation.Config()

        swap: Literal["keep_cache", "recompute"] = "keep_cache"  # of running sequences; controller.weights="in_flight"
        mesh_rules: MeshRules = ()  # edits by the devices of the trainer (axlearn_like/config/mesh_rules.py)
        workers: int = 2  # rollout workers, where the runtime has processes; more may join
        timeouts: Timeouts.Config = Timeouts.Config()  # where the runtime has processes

        def commands(self) -> tuple[str, ...]:
            """Return the commands that run such an experiment, the usual one first."""
            return ("rl", "serve")

        def programs(self, devices: Sequence[Any]) -> Programs:
            """Describe what the experiment can run on these devices: train, score, prefill and decode."""
            self._check_fit()
            return experiment_programs(self.build(), devices)

        def tuning(self) -> Tuning:
            """Return the fields that change the memory and speed of the update, but not its result."""
            return experiment_tuning(self)

        def check(self, runtime: Runtime = "ray", run_steps: int = 8) -> None:
            """Refuse, before anything expensive, what would fail later: sizes, prompts, every role's own config.

            Args:
                runtime: where the roles will live.
                run_steps: updates whose training problems are looked at.

            Raises:
                UserError: names the field to change.
            """
            self._check_sizes(runtime)
            self._check_fit()
            check_length(self.policy, self.max_prompt + self.max_new, "max_prompt + max_new", "policy")
            experiment = self.build()
            check_prompts(
                self.tasks.build(),
                experiment.tokenizer,
                max_prompt=self.max_prompt,
                num_train=run_steps * self.groups,
                per_family=0 if self.evaluation is None else self.evaluation.problems_per_family,
            )
            roles = (experiment.controller_cfg, experiment.engine_cfg, self.parameter_server, self.verifier)
            for part in (*roles, self.objective, self.learner, self.timeouts, self.warm_start):
                if part is not None:
                    part.check()
            experiment.trainer_cfg.check()

        def _check_sizes(self, runtime: Runtime) -> None:
            least = dict.fromkeys(("num_steps", "groups", "samples", "max_prompt", "max_new"), 1)
            least |= {"staleness": 0, "workers": 1 if runtime == "ray" else 0}
            for name, bound in least.items():
                if getattr(self, name) < bound:
                    raise UserError(f"{name}={getattr(self, name)}; expected {bound} or more")
            if not 0 <= self.seed < 2**32:
                raise UserError(f"seed={self.seed}: expected 0 to {2**32 - 1}")
            if runtime == "inprocess" and self.trainer.processes > 1:
                raise UserError(
                    f"trainer.processes={self.trainer.processes}, but with --runtime inprocess there is one process; "
                    "expected --runtime ray, or --set trainer.processes=1"
                )

        def _check_fit(self) -> None:
            """Fields of the children that must fit each other, which only their parent sees."""
            if not plain(self.sampler.build().cfg):
                raise UserError(
                    "sampler: training needs the whole distribution (temperature > 0, top_k=None, top_p=1, min_p=0, "
                    "repetition_penalty=1, logit_bias=()): the trainer scores tokens under it, and a truncated support "
                    "would bias every importance ratio"
                )
            if self.parameter_server.keep < self.staleness + 2:
                raise UserError(
                    f"parameter_server.keep={self.parameter_server.keep} is too few for staleness={self.staleness}: "
                    f"workers may ask for {self.staleness + 1} versions while the next is pushed; "
                    f"expected {self.staleness + 2} or more"
                )
            each_row = self.trainer.samples_per_row or self.samples
            if self.samples % each_row:
                raise UserError(f"trainer.samples_per_row={each_row} does not divide samples={self.samples}")
            if self.trainer.chunks < 1 or each_row * self.max_new % self.trainer.chunks:
                raise UserError(
                    f"trainer.chunks={self.trainer.chunks} does not divide the {each_row} x {self.max_new} tokens "
                    "of a row"
                )
            if self.evaluation is not None and self.samples < max(self.evaluation.ks):
                raise UserError(
                    f"pass@{max(self.evaluation.ks)} needs as many samples of a problem; samples={self.samples}"
                )

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.tokenizer: Tokenizer = cfg.tokenizer.build()
        # A child's field that is REQUIRED takes this config's field of the same name.
        self.engine_cfg = cfg.engine.filled_from(
            cfg,
            model=cfg.policy,
            stop_tokens=(self.tokenizer.eos,) if cfg.stop_at_eos else (),
            sampler=cfg.sampler,
        )
        self.controller_cfg = cfg.controller.filled_from(
            cfg,
            groups_per_lease=cfg.groups_per_lease or cfg.groups,
            staleness=cfg.staleness,
            timeouts=cfg.timeouts,
        )
        each_row = cfg.trainer.samples_per_row or cfg.samples
        rows = max(cfg.trainer.row_multiple, 1)  # batches have a multiple of these
        batch_shapes = padded(cfg.groups * cfg.samples // each_row, rows) // rows
        self.trainer_cfg = cfg.trainer.filled_from(
            cfg,
            model=cfg.policy,
            temperature=cfg.sampler.temperature,
            max_compilations=cfg.trainer.max_compilations or batch_shapes,
        )

    def resolved(self) -> Config:
        """Return the config with all values that components get from the experiment filled in; nothing is allocated."""
        policy = resolve_model(self.cfg.policy)
        warm = self.cfg.warm_start
        return self.cfg.clone(
            policy=policy,
            controller=self.controller_cfg,
            engine=self.engine_cfg.clone(model=policy),
            trainer=self.trainer_cfg.clone(model=policy),
            warm_start=None if warm is None else warm.build().resolved(),
        )

    # ---- roles

    def make_controller(self, run: RunDirectory) -> Controller:
        """Build the controller, with lease ids beyond those of its former incarnations."""
        events = read_rows(run.events_path)
        starts = sum(row["role"] == "controller" and row["event"] == "start" for row in events)
        sessions = sum(row["event"] == "phase_begin" and row["phase"] == "rl" for row in events)  # also in one process
        incarnations = starts + max(sessions - 1, 0)
        return self.controller_cfg.build(
            events=EventLog(run.events_path), first_lease=incarnations * LEASES_PER_INCARNATION
        )

    def make_parameter_server(
        self, *, index: int = 0, others: Sequence[ShardServer] = (), token: str | None = None
    ) -> ParameterServer:
        """Build one process of the parameter server (see `ParameterServer`)."""
        return self.cfg.parameter_server.build(index=index, others=others, token=token)

    def make_verifier(self) -> Verifier:
        """Build the verification service."""
        return self.cfg.verifier.build()

    def make_engine(self, **changes: Any) -> RolloutEngine:
        """Build a rollout engine; `changes` are fields of its config."""
        return self.engine_cfg.clone(**changes).build(decode=self.tokenizer.decode)

    def make_worker(
        self,
        name: str,
        run: RunDirectory,
        controller: LeaseSource,
        weights: ParameterServerClient,
        verifier: ScoreSource,
        began: float | None = None,
    ) -> RolloutWorker:
        """Build a rollout worker; `began`: when its process started, if not now (`time.time()`)."""
        engine = self.make_engine()
        receiver = weights.receiver(engine.weights_like, worker=name)
        return RolloutWorker(
            name=name,
            engine=engine,
            tokenizer=self.tokenizer,
            seed=self.cfg.seed,
            controller=controller,
            weights=Prefetcher(
                receiver,
                lambda params: engine.place(params, receiver.approximations),
                newest=self.cfg.controller.weights != "pinned",
                background=weights.remote,
            ),
            verifier=verifier,
            events=EventLog(run.events_path),
            swap=self.cfg.swap,
            began=began,
        )

    def make_trainer(
        self,
        run: RunDirectory,
        controller: BatchSource,
        weights: ParameterServerClient,
        processes: ProcessGroup | None = None,
    ) -> PolicyTrainer:
        """Build the trainer; `processes`: the trainer process group that this process belongs to."""
        warm = None if self.cfg.warm_start is None else warm_start_directory(run)
        return self.trainer_cfg.build(
            run=run,
            controller=controller,
            weights=weights,
            initial=None if warm is None else lambda abstract: restore_params(warm, abstract),
            seed=self.cfg.seed,
            processes=processes,
        )

    def initial_params(self, run: RunDirectory, mesh: jax.sharding.Mesh) -> Params:
        """Return the policy before the first update, as the trainer starts with it."""
        with jax.set_mesh(mesh):
            return self._initial(run, mesh)

    def _initial(self, run: RunDirectory, mesh: jax.sharding.Mesh) -> Params:
        def create(key: jax.Array) -> Params:
            return split(self.cfg.policy.build(rngs=nnx.Rngs(key)))[1]

        key = jax.random.key(self.cfg.seed)
        if self.cfg.warm_start is None:
            return jax.jit(create)(key)
        abstract = to_named_sharding(jax.eval_shape(create, key), mesh)
        return restore_params(warm_start_directory(run), abstract)


def warm_start_directory(run: RunDirectory) -> Any:
    """Return the run directory of the supervised phase, a run inside the run."""
    return run.path / "warm_start"
