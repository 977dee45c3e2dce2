"""Fields of an RL experiment, and what it refuses of them."""

from typing import Any, Literal

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.config import REQUIRED, ConfigBase, MeshRules, walk_configs
from axlearn_like.learner import Learner
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.training.trainer import Trainer
from rl.audit.alarms import Alarms
from rl.controller.controller import Controller
from rl.environments.task import environments_of
from rl.evaluation.evaluator import Evaluation
from rl.fleet.fleet import Fleet
from rl.objective import Objective
from rl.parameter_server.server import ParameterServer
from rl.protocol.experiment import Feature
from rl.protocol.timeouts import Timeouts
from rl.rollout.agent_loops.branching import Branching
from rl.rollout.agent_loops.demonstrations import GroupDemonstrations
from rl.rollout.agent_loops.graph.rollouts import GraphRollouts
from rl.rollout.agent_loops.interruption import Interruption
from rl.rollout.engine import RolloutEngine
from rl.rollout.sampling import Sampler
from rl.training.trainer import PolicyTrainer

Runtime = Literal["inprocess", "ray"]


_COMPLETED = ("engine", "trainer", "demonstrations")  # parts of which it sets REQUIRED fields when it is built
_RENAMED = {
    "groups": "prompts_per_step",
    "max_new": "max_new_tokens",
    "max_prompt": "max_prompt_tokens",
    "samples": "samples_per_prompt",
}


class RLExperimentConfig[T](ConfigBase[T], renamed=_RENAMED):
    """Fields of `RLExperiment.Config`."""

    policy: ConfigBase = REQUIRED
    tokenizer: ConfigBase = ByteTokenizer.Config()
    tasks: ConfigBase = REQUIRED
    max_prompt_tokens: int = REQUIRED  # limit of a prompt's tokens
    max_new_tokens: int = REQUIRED  # limit of a completion's tokens, the stop token included
    stop_at_eos: bool = True

    num_steps: int = REQUIRED  # number of updates
    prompts_per_step: int = REQUIRED  # prompts in a batch
    samples_per_prompt: int = REQUIRED  # rollouts of each prompt
    branching: Branching.Config | None = None  # rollouts of a prompt share their first tokens; None: they do not
    interruption: Interruption.Config | None = None  # words that end thinking which takes too long; None: none
    graph: GraphRollouts.Config | None = None  # samples are plans whose nodes are drawn in parallel; None: they are not
    demonstrations: GroupDemonstrations.Config | None = None  # reference answers mixed into the group; None: none
    groups_per_lease: int | None = None  # prompts that a worker leases at a time; None: a whole batch
    staleness: int = 0  # versions that a rollout may be behind the trainer
    seed: int = 0

    # Edits by policy, path -> value: each trains an adapter of the base `policy`, or a model; none: one policy, this.
    policies: dict[str, dict[str, Any]] = {}
    policy_shares: dict[str, float] = {}  # tokens of each policy, relative to the others' 1
    policy_quotas: dict[str, dict[str, float]] = {}  # most "tokens_per_second" and "tokens_in_flight" of a policy
    policy_slots: int | None = None  # adapters that train at a time, with those that join; None: as many as begin

    start_from: StartFrom.Config | None = None  # parameters of another run, such as one of `axl train`
    warm_start: Trainer.Config | None = None  # supervised fine-tuning first; None: RL at once
    objective: Objective.Config = Objective.Config(old_policy="current")
    learner: Learner.Config = REQUIRED
    sampler: Sampler.Config = Sampler.Config()
    trainer: PolicyTrainer.Config = PolicyTrainer.Config()
    controller: Controller.Config = Controller.Config()
    engine: RolloutEngine.Config = RolloutEngine.Config(keep_completions=False)
    parameter_server: ParameterServer.Config = ParameterServer.Config()
    verifier: ConfigBase = REQUIRED  # Verifier, or InlineVerifier for trusted functions
    evaluation: Evaluation.Config | None = Evaluation.Config()  # evaluation before and after RL; None: none
    evaluate_every: int | None = None  # updates between evaluations during RL; None: there are none

    swap: Literal["keep_cache", "recompute"] = "keep_cache"  # cache at new weights, with controller.weights="in_flight"
    fleet: Fleet.Config = Fleet.Config()  # devices of the roles
    mesh_rules: MeshRules = ()  # edits by the devices of the trainer (axlearn_like/config/mesh_rules.py)
    workers: int = 2  # number of rollout workers, if the runtime has processes; more may join
    standby: dict[str, int] = {}  # warm processes that take over from dead ones: {"trainer": 1, "worker": 1}; {}: none
    alarms: Alarms.Config = Alarms.Config()  # limits of metrics beyond which a run is said to fail
    timeouts: Timeouts.Config = Timeouts.Config()  # limits of waits, if the runtime has processes

    def _check_standby(self) -> None:
        """Refuse warm processes of roles that cannot be taken over (ConfigError)."""
        known = 'counts of "trainer" (at most 1) and "worker", such as {"trainer": 1, "worker": 1}'
        fits = all(role in ("trainer", "worker") and count >= 0 for role, count in self.standby.items())
        self.require("standby", fits and self.standby.get("trainer", 0) <= 1, known)
        self.require("standby", not self.standby or not self.policies, "{} with several policies")
        alone = not self.standby.get("trainer") or self.trainer.processes == 1
        self.require("standby", alone, '{"trainer": 0} with a trainer of several processes, which restart together')
        held = not self.standby.get("trainer") or self.fleet.reference is None
        self.require("standby", held, '{"trainer": 0} with fleet.reference, which answers one trainer')
        alone = not self.standby.get("worker") or self.fleet.worker_hosts == 1
        self.require("standby", alone, '{"worker": 0} with workers over several hosts, which restart together')

    def check_fields(self) -> None:
        """Refuse sizes, and what does not fit a part of the experiment that says what it `requires`."""
        self.require_least(
            1, "num_steps", "prompts_per_step", "samples_per_prompt", "max_prompt_tokens", "max_new_tokens"
        )
        self.require_least(0, "staleness", "workers")
        self.require("seed", 0 <= self.seed < 2**32, f"0 to {2**32 - 1}")
        once = self.start_from is None or self.warm_start is None
        self.require("start_from", once, "None with a warm start, whose own `warm_start.start_from` says the same")
        self._check_standby()
        self.require_least(1, "evaluate_every")
        fits = self.evaluate_every is None or self.evaluation is not None
        self.require("evaluate_every", fits, "None where there is no `evaluation`")
        if self.controller.audit:
            self.check_repeatable("with controller.audit")
        completed = [getattr(self, name) for name in _COMPLETED]
        for path, part in walk_configs(self):
            if isinstance(part, Feature) and not path.startswith("policies"):  # edits need not fit this config
                if not any(part is one for one in completed):
                    part.check_set()
                part.requires(self)

    def check_repeatable(self, purpose: str) -> None:
        """Refuse rollouts that cannot be made again from their names (ConfigError); `purpose`: of making them."""
        from rl.verification.verifiers.judge import LLMJudge

        pinned = self.controller.weights == "pinned" or self.staleness == 0
        self.controller.require("weights", pinned, f'"pinned" {purpose}: else versions depend on time')
        self.require("graph", self.graph is None, f"None {purpose}: the nodes of a plan are drawn with their sample")
        impure = [type(one).__owner__.__name__ for one in environments_of(self.tasks) if not one.is_pure()]
        self.require("tasks", not impure, f"pure environments {purpose}, not {' and '.join(impure)}")
        judged = any(isinstance(part, LLMJudge.Config) for _, part in walk_configs(self.verifier))
        self.require("verifier", not judged, f"one without LLMJudge {purpose}: its rewards do not repeat")
