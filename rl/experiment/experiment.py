"""One RL experiment as a config, and the construction of each role from it.

The experiment gives every component what only it knows (sizes, seeds, the task mixture); components never read their
parent. A runtime calls the `make_*` methods in the process where a role will run: this one, or an actor's.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.pretrained import pretrained_source
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.run.clock import REAL, RunClock
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from axlearn_like.tokenizers.embedding import check_tokenizer
from axlearn_like.tokenizers.protocol import Tokenizer, completion_text
from axlearn_like.training.program import Tuning, check_length
from axlearn_like.training.trainer import resolve_model
from mesh.cost.program import Programs
from mesh.distributed import ProcessGroup
from rl.audit.comparison import AuditTerms
from rl.audit.rollout_ledger import RolloutLedger
from rl.controller.audits import Audits
from rl.controller.controller import Controller
from rl.controller.evaluations import EvaluationSchedule
from rl.controller.leasing import LEASES_PER_POLICY
from rl.controller.samples import SampleLog
from rl.experiment.config import RLExperimentConfig, Runtime
from rl.fleet.fleet import reference_devices
from rl.fleet.kernels import policy_kernels
from rl.fleet.programs import experiment_programs, experiment_tuning
from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.pull.prefetcher import Prefetcher
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.shard_server import ShardServer
from rl.parameter_server.transport.tls import Tls
from rl.protocol.protocols import LeaseSource, ScoreSource
from rl.rollout.agent_loops.demonstrations import GroupDemonstrations
from rl.rollout.agent_loops.episodes import Episodes
from rl.rollout.agent_loops.graph.rollouts import GraphRollouts
from rl.rollout.agent_loops.interruption import Interruption
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.model_runner.processes.pulls import GroupReceiver
from rl.rollout.model_runner.processes.remote_runner import RemoteRunner
from rl.rollout.model_runner.processes.remote_runners import RemoteRunners
from rl.rollout.model_runner.runner import ModelRunner
from rl.rollout.model_runner.weights import types_read
from rl.rollout.sampling import recorded_candidates
from rl.rollout.worker import RolloutWorker
from rl.rollout.worker_policy import WorkerFeatures, WorkerPolicy, WorkerServices
from rl.tasks.family import TaskFamily
from rl.tasks.mixture import TaskMixture
from rl.tasks.prompts import check_prompts
from rl.tasks.rows.sources import with_fetched_files
from rl.tasks.skipped import SkippedProblems, skipped_path
from rl.training.columns import recording
from rl.training.logprobs import padded
from rl.training.packing import DEFAULT_SHAPES
from rl.training.scoring.logprob_diff import BOUNDS
from rl.training.scoring.reference_role import ReferenceRole, ReferenceScorer
from rl.training.scoring.saved_versions import SavedVersions
from rl.training.spec import DrawingPolicy, FirstVersion, Opponents, TrainerServices
from rl.training.trainer import PolicyTrainer
from rl.training.warm_start import check_warm_start, warm_start_directory
from rl.verification.scorers import Scorer, check_problems
from rl.verification.service import Verifier

# Lease ids of one controller process; so a lease is never confused with one of the next incarnation.
LEASES_PER_INCARNATION = 1_000_000_000
_QUARTER = LEASES_PER_INCARNATION // 4  # the first half for updates and audits, the second for evaluations


class RLExperiment(Configurable):
    """A policy, tasks, an objective, and the sizes of one update.

    >>> from experiments.demo.config import demo
    >>> cfg = demo(seed=0).set(num_steps=5)
    >>> cfg.objective.surrogate.high = 0.28
    >>> cfg.check("inprocess")  # refuses what cannot run, before anything begins
    >>> cfg.objective.surrogate.high
    0.28
    """

    class Config(RLExperimentConfig["RLExperiment"]):
        def commands(self) -> tuple[str, ...]:
            """Return the commands that run such an experiment, the usual one first."""
            return ("rl", "serve")

        def programs(self, devices: Sequence[Any]) -> Programs:
            """Describe what the experiment can run on these devices: train, score, prefill and decode."""
            return experiment_programs(self.build(), devices)

        def tuning(self) -> Tuning:
            """Return the fields that change the memory and speed of the update, but not its result."""
            return experiment_tuning(self)

        def kernels(self, attention: AttentionParams, platform: str, dtype: Any) -> Iterator[str]:
            """Yield a line for each context of RL: the kernel that this attention of the policy gets there."""
            return policy_kernels(self, attention, platform, dtype)

        def resolved(self) -> ConfigBase["RLExperiment"]:
            """Return the config with every value that a parent sets filled in; nothing is allocated."""
            return self.build().resolved()

        def check(self, runtime: Runtime = "ray", run_steps: int = 8, devices: Sequence[Any] | None = None) -> None:
            """Refuse, before anything expensive, what would fail later: sizes, prompts, every role's own config.

            Args:
                runtime: where the roles will live.
                run_steps: updates whose training problems are looked at.
                devices: devices of the trainer, described; None: those of this process; empty: not known here.

            Raises:
                UserError: names the field to change.
            """
            super().check()
            audited = self.controller.audit > 0
            if runtime == "ray":
                self.require_least(1, "workers")
                enough = "3 or more with controller.audit: where two have drawn differently, a third decides"
                self.require("workers", not audited or self.workers >= 3, enough)
            else:
                self.require("standby", not self.standby, "{} with --runtime inprocess, which has one process")
                alone = "0 with --runtime inprocess, whose worker has nobody to draw again for it"
                self.controller.require("audit", not audited, alone)
                one = self.trainer.processes == 1
                self.trainer.require("processes", one, "1 with --runtime inprocess; more need --runtime ray")
            check_tokenizer(self.tokenizer, self.policy)
            check_length(
                self.policy,
                self.max_prompt_tokens + self.max_new_tokens,
                "max_prompt_tokens + max_new_tokens",
                "policy",
            )
            experiment = self.build()
            tasks = self.tasks.build()
            check_prompts(
                tasks,
                experiment.controller_cfg.prompt_maker(experiment.tokenizer),
                max_prompt_tokens=self.max_prompt_tokens,
                num_train=run_steps * self.prompts_per_step,
                per_family=0 if self.evaluation is None else self.evaluation.problems_per_family,
            )
            first = [tasks.train(index) for index in range(self.prompts_per_step)]
            check_problems(self.verifier, first)
            if (given := experiment.make_demonstrations()) is not None:
                given.check(first)
            if (cfg := self.interruption) is not None and (ends := experiment.make_interruption()) is not None:
                room = (
                    f"so that at + spread + the {ends.longest - cfg.at - cfg.spread} tokens of its words are less than "
                )
                cfg.require("at", ends.longest < self.max_new_tokens, f"{room}max_new_tokens={self.max_new_tokens}")
            experiment.controller_cfg.check()
            experiment.engine_cfg.check()
            experiment.trainer_cfg.check(devices)
            if self.fleet.reference is not None:
                experiment.trainer_cfg.check_reference(reference_devices(self.fleet.reference).described)
            if self.warm_start is not None:
                check_warm_start(self.warm_start, experiment.trainer_cfg, devices)

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.tokenizer: Tokenizer = cfg.tokenizer.build()
        # A child's field that is REQUIRED takes this config's field of the same name.
        self.engine_cfg = cfg.engine.filled_from(
            cfg,
            model=self._drawing(cfg.policy),
            stop_tokens=self.tokenizer.stop_ids if cfg.stop_at_eos else (),
            sampler=cfg.sampler,
        )
        self.controller_cfg = cfg.controller.filled_from(
            cfg,
            groups_per_lease=cfg.groups_per_lease or cfg.prompts_per_step,
            staleness=cfg.staleness,
            timeouts=cfg.timeouts,
            max_prompt_tokens=cfg.max_prompt_tokens,
        )
        each_row = cfg.trainer.samples_per_row or cfg.samples_per_prompt
        rows = max(cfg.trainer.row_multiple, 1)  # batches have a multiple of these
        self._batch_shapes = padded(cfg.prompts_per_step * cfg.samples_per_prompt // each_row, rows) // rows
        if cfg.trainer.packing is not None:
            self._batch_shapes = len(cfg.trainer.packing.lengths) or DEFAULT_SHAPES
        self.trainer_cfg = cfg.trainer.filled_from(
            cfg,
            model=cfg.policy,
            temperature=cfg.sampler.temperature,
            candidate_tokens=recorded_candidates(cfg.sampler),
            reference_devices=cfg.fleet.reference,
            max_compilations=cfg.trainer.max_compilations or self._batch_shapes,
        )

    def resolved(self) -> Config:
        """Return the config with all values that components get from the experiment filled in; nothing is allocated."""
        policy = resolve_model(self.cfg.policy)
        warm = self.cfg.warm_start
        return self.cfg.clone(
            policy=policy,
            controller=self.controller_cfg,
            engine=self.engine_cfg.clone(model=self._drawing(policy)),
            trainer=self.trainer_cfg.clone(model=policy),
            warm_start=None if warm is None else warm.resolved(),
        )

    def _drawing(self, policy: ConfigBase) -> ConfigBase:
        """Return the policy as the engine has it: with a record of its routing if the trainer replays that."""
        if not self.cfg.trainer.replay_routing:
            return policy
        with self.cfg.trainer.errors_in("replay_routing"):
            return recording(policy)

    @property
    def first_params(self) -> StartFrom.Config | None:
        """The source of the first parameters without a warm start: `start_from`, or the policy's own."""
        return self.cfg.start_from or pretrained_source(self.cfg.policy)

    def check_start(self) -> None:
        """Refuse first parameters of another model, or none, without reading them (ConfigError)."""
        start, field = self.first_params, "policy" if self.cfg.start_from is None else "start_from"
        if start is not None:
            policy = split(build_abstract(self.cfg.policy))[1]
            with self.cfg.errors_in(field):
                start.build().check(policy)

    def data_digests(self) -> dict[str, str]:
        """Return checksums of the data that the tasks read, by task."""
        tasks = self.cfg.tasks
        reads = isinstance(tasks, TaskMixture.Config) and not all(
            isinstance(one, TaskFamily.Config) for one in tasks.families
        )
        return tasks.build().digests() if reads else {}

    # ---- roles

    def make_controller(
        self, run: RunDirectory, number: int = 0, *, events: EventLog | None = None, clock: RunClock = REAL
    ) -> Controller:
        """Build the controller, with lease ids beyond those of its former incarnations; `number`: of its policy.

        `events`: None: those of the run directory.
        """
        rows = read_rows(run.events_path, ("start", "session", "quarantined"))
        starts = sum(row["role"] == "controller" and row["event"] == "start" for row in rows)
        first_lease = number * LEASES_PER_POLICY + starts * LEASES_PER_INCARNATION
        cfg = self.controller_cfg
        evaluations = self.cfg.evaluation and EvaluationSchedule(
            *(self.cfg.evaluation, cfg, run, self.tokenizer),
            every=self.cfg.evaluate_every,
            seed=self.cfg.seed,
            first_lease=first_lease + LEASES_PER_INCARNATION // 2,
        )
        events = events or EventLog(run.events_path)
        skipped = SkippedProblems(skipped_path(run.path))
        logs: dict[str, Any] = {
            "events": events,
            "skipped": skipped,
            "clock": clock,
            "observers": (SampleLog(run.rollouts, self.tokenizer, clock).observe, RolloutLedger(run.path).observe),
        }
        audits = None
        if cfg.audit:
            ids: dict[str, Any] = {"first_lease": first_lease + _QUARTER, "leases": _QUARTER}
            session = next((n for n in reversed(range(len(rows))) if rows[n]["event"] == "session"), 0)
            wrong = [row["worker"] for row in rows[session:] if row["event"] == "quarantined"]
            audits = Audits(cfg.audit, self._audit_terms(), **ids, events=events, quarantined=wrong)
        return cfg.build(first_lease=first_lease, evaluations=evaluations, audits=audits, **logs)

    def _audit_terms(self) -> AuditTerms:
        """Return the terms by which drawings on several classes of hardware are compared."""
        dtype = getattr(self.cfg.policy, "dtype", "float32")
        greatest = {name: bound for name, (_, bound) in BOUNDS.items()}
        on_cpus = greatest["float32" if dtype == "float32" else "bfloat16"]
        model: Any = resolve_model(self.cfg.policy)
        return AuditTerms(self.cfg.seed, model.vocab_size, on_cpus, greatest["bfloat16"])

    def make_parameter_server(
        self, *, index: int = 0, others: Sequence[ShardServer] = (), token: str | None = None
    ) -> ParameterServer:
        """Build one process of the parameter server (see `ParameterServer`)."""
        return self.cfg.parameter_server.build(index=index, others=others, token=token)

    def make_verifier(self) -> Verifier:
        """Build the verification service; its processes read rows of buckets from copies that are made here."""
        return with_fetched_files(self.cfg.verifier).build()

    def _wanted_of_rollouts(self) -> frozenset[str]:
        scorer = getattr(self.cfg.verifier, "scorer", None)
        return scorer.wants() if isinstance(scorer, Scorer.Config) else frozenset()

    def make_engine(
        self, remote_runners: RemoteRunners | None = None, adapters: AdapterLimits | None = None, **changes: Any
    ) -> RolloutEngine:
        """Build an engine; `remote_runners`: its others; `adapters`: room for LoRA; `changes` of its config."""
        decode = partial(completion_text, self.tokenizer)
        return self.engine_cfg.clone(**changes).build(decode=decode, remote_runners=remote_runners, adapters=adapters)

    def make_worker(
        self,
        name: str,
        run: RunDirectory,
        controller: LeaseSource,
        weights: ParameterServerClient,
        verifier: ScoreSource,
        began: float | None = None,
        processes: ProcessGroup | None = None,
        token: str = "",
    ) -> RolloutWorker:
        """Build a rollout worker.

        Args:
            began: when its process started, if not now (`time.time()`).
            processes: group of a worker that has several, of which this is the leader (others: `make_remote_runner`).
            token: the secret of the run, by which these know each other.
        """
        remote_runners = None if processes is None else RemoteRunners.meet(processes, token, self._tls())
        engine = self.make_engine(remote_runners)
        prefetcher = self.make_prefetcher(engine, weights, name, remote_runners)
        depot = None if self.engine_cfg.tiers is None else weights.depot
        services = WorkerServices(controller, prefetcher, verifier, EventLog(run.events_path), depot=depot)
        policy = self.worker_policy(services)
        return RolloutWorker(name, engine, {"": policy}, swap=self.cfg.swap, began=began)

    def worker_policy[Weights](self, services: WorkerServices[Weights]) -> WorkerPolicy[Weights]:
        """Build the parts of a worker that belong to this experiment's policy."""
        features = WorkerFeatures(
            wants=self._wanted_of_rollouts(),
            episodes=Episodes.of(self.cfg.tasks, self.tokenizer, self.cfg.seed),
            branching=None if self.cfg.branching is None else self.cfg.branching.build(),
            demonstrations=self.make_demonstrations(),
            interruption=self.make_interruption(),
            graph=self.make_graph(),
        )
        return WorkerPolicy(self.tokenizer, self.cfg.seed, services, features, self.cfg.sampler)

    def make_interruption(self) -> Interruption | None:
        """Build what ends thinking that takes too long, if anything does."""
        cfg = self.cfg.interruption
        return None if cfg is None else cfg.build(tokenizer=self.tokenizer)

    def make_graph(self) -> GraphRollouts | None:
        """Build what draws samples as plans, if anything does."""
        cfg = self.cfg.graph
        return None if cfg is None else cfg.build(tokenizer=self.tokenizer, max_new_tokens=self.cfg.max_new_tokens)

    def make_demonstrations(self) -> GroupDemonstrations | None:
        """Build what a worker puts beside the policy's rollouts, if anything."""
        cfg = self.cfg.demonstrations
        if cfg is None:
            return None
        return cfg.filled_from(self.cfg).build(tasks=self.cfg.tasks.build(), tokenizer=self.tokenizer)

    def make_remote_runner(
        self, weights: ParameterServerClient, processes: ProcessGroup, token: str, host: str = "127.0.0.1"
    ) -> RemoteRunner:
        """Build what a process of a rollout worker runs that is not its leader; `host`: its address."""
        runner = ModelRunner(self.engine_cfg)
        receiver = weights.receiver(runner.weights_like, worker=processes.name)
        return RemoteRunner(runner, receiver, token, host=host, tls=self._tls()).meet(processes)

    def make_prefetcher(
        self,
        engine: RolloutEngine,
        weights: ParameterServerClient,
        name: str,
        remote_runners: RemoteRunners | None = None,
    ) -> Prefetcher:
        """Build the source of an engine's weights (see `make_worker`)."""
        receiver = weights.receiver(engine.runner.weights_like, worker=name)
        newest = self.cfg.controller.weights != "pinned"
        if remote_runners is None:
            place = lambda params: engine.place(params, receiver.approximations)  # noqa: E731
            return Prefetcher(receiver, place, newest=newest, background=weights.remote)
        group = GroupReceiver(receiver, remote_runners)
        finish = partial(group.place, executor=engine.executor)
        return Prefetcher(group, lambda pulled: pulled, newest=newest, background=weights.remote, finish=finish)

    def _tls(self) -> Tls | None:
        cfg = self.cfg.parameter_server.tls
        return None if cfg is None else cfg.build()

    def make_trainer(
        self,
        run: RunDirectory,
        services: TrainerServices,
        processes: ProcessGroup | None = None,
        devices: Sequence[Any] | None = None,
        first: FirstVersion | None = None,
        opponents: Opponents | None = None,
    ) -> PolicyTrainer:
        """Build the trainer.

        Args:
            services: the roles that it calls; the reference where `fleet.reference` names its devices.
            devices: devices of the trainer's mesh; None: all.
            first: source of version 0; None: the experiment's own.
            opponents: versions that draw in episodes of other policies; None: none do.
        """
        trainer = self.trainer_cfg.build(
            run=run,
            services=services,
            devices=devices,
            first=first or self.first_version(run),
            processes=processes,
            drawing=DrawingPolicy(
                types_read(self.engine_cfg), self.engine_cfg.possible_tags, opponents=opponents or Opponents()
            ),
        )
        sizes = {"groups": self.cfg.prompts_per_step, "samples": self.cfg.samples_per_prompt}
        trainer.compile_ahead(**sizes, sure=self._batch_shapes == 1)
        return trainer

    def make_reference_scorer(self, run: RunDirectory, devices: Sequence[Any] | None = None) -> ReferenceScorer:
        """Build the policy of the reference role on its devices (None: all), once the warm start is complete."""
        saved = SavedVersions(run.checkpoints / "rl", run.path / "reference")
        first = self.first_version(run)
        return ReferenceScorer(self.trainer_cfg, first=first, devices=devices, saved=saved)

    def make_reference(
        self, run: RunDirectory, processes: ProcessGroup, leader: ReferenceRole | None = None
    ) -> ReferenceRole:
        """Build a process of the reference role; `leader`: of several processes the first, for the others."""
        return ReferenceRole(self.make_reference_scorer(run), processes, EventLog(run.events_path), leader=leader)

    def first_version(self, run: RunDirectory) -> FirstVersion:
        """Return the source of version 0: the warm start's end, what `start_from` names, or random weights."""
        initial = None if self.first_params is None else self.first_params.build().params
        if self.cfg.warm_start is not None:
            initial = partial(restore_params, warm_start_directory(run))
        return FirstVersion(initial, self.cfg.seed)
