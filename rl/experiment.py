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
from rl.tasks.mixture import encode_prompt
from rl.training.program import padded
from rl.training.trainer import PolicyTrainer
from rl.verification.service import Verifier

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
            return experiment_programs(self.build(), devices)

        def tuning(self) -> Tuning:
            """Return the fields that change the memory and speed of the update, but not its result."""
            return experiment_tuning(self)

    def __init__(self, cfg: Config):
        if not 0 <= cfg.seed < 2**32:
            raise UserError(f"seed={cfg.seed}: expected 0 to {2**32 - 1}")
        self.cfg = cfg
        cfg.timeouts.build()  # checks it
        self.tokenizer: Tokenizer = cfg.tokenizer.build()
        self.engine_cfg = cfg.engine.clone(
            model=cfg.policy,
            stop_tokens=(self.tokenizer.eos,) if cfg.stop_at_eos else (),
            max_prompt=cfg.max_prompt,
            max_new=cfg.max_new,
            sampler=cfg.sampler,
        )
        if not plain(cfg.sampler.build().cfg):
            raise UserError(
                "sampler: training needs the whole distribution (temperature > 0, top_k=None, top_p=1, min_p=0, "
                "repetition_penalty=1, logit_bias=()): the trainer scores tokens under it, and a truncated support "
                "would bias every importance ratio"
            )
        if cfg.parameter_server.keep < cfg.staleness + 2:
            raise UserError(
                f"parameter_server.keep={cfg.parameter_server.keep} is too few for staleness={cfg.staleness}: "
                f"workers may ask for {cfg.staleness + 1} versions while the next is pushed; "
                f"expected {cfg.staleness + 2} or more"
            )
        each_row = cfg.trainer.samples_per_row or cfg.samples
        if cfg.samples % each_row:
            raise UserError(f"trainer.samples_per_row={each_row} does not divide samples={cfg.samples}")
        if cfg.trainer.chunks < 1 or each_row * cfg.max_new % cfg.trainer.chunks:
            raise UserError(
                f"trainer.chunks={cfg.trainer.chunks} does not divide the {each_row} x {cfg.max_new} tokens of a row"
            )
        self.controller_cfg = cfg.controller.clone(
            tasks=cfg.tasks,
            tokenizer=cfg.tokenizer,
            num_steps=cfg.num_steps,
            groups=cfg.groups,
            samples=cfg.samples,
            groups_per_lease=cfg.groups_per_lease or cfg.groups,
            staleness=cfg.staleness,
            timeouts=cfg.timeouts,
        )
        rows = cfg.trainer.row_multiple  # batches have a multiple of these
        batch_shapes = padded(cfg.groups * cfg.samples // each_row, rows) // rows
        self.trainer_cfg = cfg.trainer.clone(
            model=cfg.policy,
            objective=cfg.objective,
            learner=cfg.learner,
            num_steps=cfg.num_steps,
            staleness=cfg.staleness,
            max_prompt=cfg.max_prompt,
            max_new=cfg.max_new,
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

    def check(self, run_steps: int = 8) -> None:
        """Check, before anything expensive, what would fail later: tasks, prompt lengths, held-out overlap.

        Raises:
            UserError, ValueError: naming the field to change.
        """
        tasks = self.cfg.tasks.build()
        longest = 0
        for index in range(run_steps * self.cfg.groups):
            problem = tasks.train(index)
            length = len(encode_prompt(problem.question, self.tokenizer))
            longest = max(longest, length)
            if length > self.cfg.max_prompt:
                raise UserError(
                    f"training problem {index} of family {problem.family!r} has {length} prompt tokens; "
                    f"max_prompt is {self.cfg.max_prompt}"
                )
        if self.cfg.evaluation is not None:
            if self.cfg.samples < max(self.cfg.evaluation.ks):
                raise UserError(
                    f"pass@{max(self.cfg.evaluation.ks)} needs as many samples of a problem; samples={self.cfg.samples}"
                )
            per_family = self.cfg.evaluation.problems_per_family
            tasks.check_disjoint(self.cfg.groups * run_steps, per_family)
            for problem in tasks.heldout(per_family):
                length = len(encode_prompt(problem.question, self.tokenizer))
                if length > self.cfg.max_prompt:
                    raise UserError(
                        f"held-out problem {problem.id} of family {problem.family!r} has {length} prompt tokens; "
                        f"max_prompt is {self.cfg.max_prompt}"
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
