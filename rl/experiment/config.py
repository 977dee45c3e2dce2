"""Fields of an RL experiment, and what it refuses of them."""

from typing import Literal

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.config import REQUIRED, ConfigBase, MeshRules
from axlearn_like.kernels.exact.scope import numerics_of
from axlearn_like.learner import Learner
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.training.alignment.reference import FrozenCopy
from axlearn_like.training.trainer import Trainer
from rl.audit.alarms import Alarms
from rl.controller.controller import Controller
from rl.environments.task import environments_of
from rl.evaluation.evaluator import Evaluation
from rl.fleet.fleet import Fleet
from rl.objective import NoImportance, Objective
from rl.parameter_server.server import ParameterServer
from rl.protocol.timeouts import Timeouts
from rl.rollout.agent_loops.branching import Branching
from rl.rollout.agent_loops.demonstrations import GroupDemonstrations
from rl.rollout.agent_loops.interruption import Interruption
from rl.rollout.engine import RolloutEngine
from rl.rollout.sampling import Sampler, plain, recorded_support
from rl.training.compatibility import check_objective
from rl.training.trainer import PolicyTrainer

Runtime = Literal["inprocess", "ray"]


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
    max_prompt_tokens: int = REQUIRED  # tokens
    max_new_tokens: int = REQUIRED  # tokens, the stop token included
    stop_at_eos: bool = True

    num_steps: int = REQUIRED  # updates
    prompts_per_step: int = REQUIRED  # prompts in a batch
    samples_per_prompt: int = REQUIRED  # rollouts of each prompt
    branching: Branching.Config | None = None  # rollouts of a prompt share their first tokens; None: they do not
    interruption: Interruption.Config | None = None  # words that end thinking which takes too long; None: none
    demonstrations: GroupDemonstrations.Config | None = None  # answers among the rollouts that nobody drew
    groups_per_lease: int | None = None  # prompts that a worker leases at a time; None: a whole batch
    staleness: int = 0  # versions that a rollout may be behind the trainer
    seed: int = 0

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
    evaluation: Evaluation.Config | None = Evaluation.Config()  # before and after RL
    evaluate_every: int | None = None  # updates between evaluations during RL; None: there are none

    swap: Literal["keep_cache", "recompute"] = "keep_cache"  # of running sequences; controller.weights="in_flight"
    fleet: Fleet.Config = Fleet.Config()  # devices of the roles
    mesh_rules: MeshRules = ()  # edits by the devices of the trainer (axlearn_like/config/mesh_rules.py)
    workers: int = 2  # rollout workers, where the runtime has processes; more may join
    alarms: Alarms.Config = Alarms.Config()  # limits of metrics beyond which a run is said to fail
    timeouts: Timeouts.Config = Timeouts.Config()  # where the runtime has processes

    def check_fields(self) -> None:
        """Refuse sizes, and fields of the children that do not fit each other, which only their parent sees."""
        self.require_least(
            1, "num_steps", "prompts_per_step", "samples_per_prompt", "max_prompt_tokens", "max_new_tokens"
        )
        self.require_least(0, "staleness", "workers")
        self.require("seed", 0 <= self.seed < 2**32, f"0 to {2**32 - 1}")
        self.require(
            "sampler",
            plain(self.sampler) or recorded_support(self.sampler) is not None,
            "the whole distribution (temperature > 0, top_k=None, top_p=1, min_p=0, repetition_penalty=1, "
            "logit_bias=()), or RecordedSampler.Config(...): the trainer scores tokens under it, and a truncated "
            "support that is not recorded would bias every importance ratio",
        )
        most, words = recorded_support(self.sampler), getattr(self.policy, "vocab_size", REQUIRED)
        if most is not None and isinstance(words, int):
            self.sampler.require("most", most <= words, f"at most policy.vocab_size={words}")
        check_objective(self.objective, self, self.trainer)
        least = self.staleness + 2  # staleness + 1 that workers may ask for, and the one that is being pushed
        kept = self.parameter_server.keep >= least
        self.parameter_server.require("keep", kept, f"{least} or more with staleness={self.staleness}")
        trainer, each_row = self.trainer, self.trainer.samples_per_row or self.samples_per_prompt
        trainer.require(
            "samples_per_row",
            self.samples_per_prompt % each_row == 0,
            f"a divisor of samples_per_prompt={self.samples_per_prompt}",
        )
        tokens = f"the {each_row} x {self.max_new_tokens} tokens of a row"
        fits = trainer.chunks >= 1 and each_row * self.max_new_tokens % trainer.chunks == 0
        trainer.require("chunks", trainer.packing is not None or fits, f"a divisor of {tokens}")
        once = self.start_from is None or self.warm_start is None
        self.require("start_from", once, "None with a warm start, whose own `warm_start.start_from` says the same")
        same = self.parameter_server.codec in ("raw", "delta")
        if numerics_of(self.policy) == "exact":
            expected = 'raw or delta with policy.numerics="exact", for workers must have the numbers of the trainer'
            self.parameter_server.require("codec", same, expected)
        objective, tags = self.objective, self.engine.tags
        corrected = objective.old_policy == "behaviour" or not isinstance(objective.importance, NoImportance.Config)
        expected = f"TruncatedImportance.Config, as rollouts are of {' and '.join(tags)}"
        objective.require("importance", corrected or not tags, expected)
        self.require_least(1, "evaluate_every")
        fits = self.evaluate_every is None or self.evaluation is not None
        self.require("evaluate_every", fits, "None where there is no `evaluation`")
        if self.branching is not None:
            self._check_branching(self.branching)
        self._check_demonstrations()
        whole = not environments_of(self.tasks) and self.branching is None
        expected = "None with environments or branching, which have loops of their own"
        self.require("interruption", self.interruption is None or whole, expected)
        if self.fleet.reference is not None:
            self._check_reference()
        if self.evaluation is not None:
            most = max(self.evaluation.ks)
            self.require(
                "samples_per_prompt",
                self.samples_per_prompt >= most,
                f"{most} or more, for pass@{most} (evaluation.ks)",
            )

    def _check_demonstrations(self) -> None:
        mixes, given = self.objective.surrogate.build().mixes, self.demonstrations
        expected = "MixedPolicy.Config(), or objective=luffy(...), with demonstrations, which no policy of the run drew"
        self.objective.require("surrogate", mixes or given is None, expected)
        expected = "GroupDemonstrations.Config() with objective.surrogate=MixedPolicy.Config(), which learns from them"
        self.require("demonstrations", given is not None or not mixes, expected)
        if given is None:
            return
        drawn = self.samples_per_prompt - given.per_prompt
        given.require(
            "per_prompt",
            drawn >= 1,
            f"less than samples_per_prompt={self.samples_per_prompt}: the policy draws the others",
        )
        whole = not environments_of(self.tasks) and self.branching is None
        expected = "None with environments or branching, whose rollouts are the policy's own"
        self.require("demonstrations", whole, expected)
        self.require("stop_at_eos", self.stop_at_eos, "True with demonstrations, which end so")
        self.require("sampler", plain(self.sampler), "the whole distribution with demonstrations: none has a support")
        unread = not self.trainer.replay_routing
        self.trainer.require("replay_routing", unread, "False with demonstrations, of which no routing is recorded")
        shaping = self.objective.reward_shaping
        free = shaping is None or not shaping.build().needs_reference
        expected = "one without a reference: log mu - log ref of a demonstration is not known; or a regulariser"
        self.objective.require("reward_shaping", free, expected)

    def _check_branching(self, branching: Branching.Config) -> None:
        branching.require(
            "at", max(branching.at, default=0) < self.max_new_tokens, f"less than max_new_tokens={self.max_new_tokens}"
        )
        leaves = branching.leaves
        expected = f"a multiple of {leaves} (branching.ways ** len(branching.at)), {2 * leaves} or more"
        why = "; a group of one tree has no gradient for what all its samples share"
        self.require(
            "samples_per_prompt",
            self.samples_per_prompt % leaves == 0 and self.samples_per_prompt >= 2 * leaves,
            expected + why,
        )
        self.require("branching", not environments_of(self.tasks), "None with environments, whose episodes are whole")

    def _check_reference(self) -> None:
        """Refuse a reference role that has nothing to score by, or whose weights could not be had again."""
        reference, fleet = self.trainer.reference, self.fleet
        terms = "objective.regulariser=ReferenceKL.Config() or objective.reward_shaping=ReferencePenalty.Config()"
        why = "there is no reference policy"
        way = f"set trainer.reference=FrozenCopy.Config() and a term that compares with it ({terms})"
        fleet.require("reference", reference is not None, f"None, for {why}; or {way}")
        assert reference is not None, "refused above"
        estimated = not self.objective.build().needs_exact_kl
        expected = "None with ReferenceKL.Config(estimator='exact'), for which the trainer holds the reference's head"
        fleet.require("reference", estimated, expected)
        whole = "FrozenCopy.Config(), WithoutAdapters.Config() or Teacher.Config()"
        why = "it is made of all versions, which the trainer alone sees"
        expected = f"None with trainer.reference={type(reference).__owner__.__name__}, for {why}; or {whole}"
        fleet.require("reference", reference.version_at(0) is not None, expected)
        every = reference.reset_every if isinstance(reference, FrozenCopy.Config) else None
        checkpoint = self.trainer.checkpoint
        saved = every is None or every % checkpoint.save_every == 0
        expected = f"a divisor of trainer.reference.reset_every={every}, as fleet.reference reads those versions"
        checkpoint.require("save_every", saved, expected)
        here = reference.another_model or (self.warm_start is None and every is None)
        why = "version 0, or the one that the reference was reset to, is on this disk only"
        kept = self.trainer.remote is None or here
        self.trainer.require("remote", kept, f"None with fleet.reference and a warm start or reset_every: {why}")
