"""Features of RL that a user switches on by options, and which of them exclude each other.

Nothing here knows a rule: each feature, and each two, are switched on in an experiment, and the refusals are those
that a run would begin with. What a part needs of the others it says itself (`requires`, rl/protocol/experiment.py).
"""

import itertools
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from axlearn_like.config import ConfigBase, ConfigError, check_values, path_of
from tools.experiment import apply_edits, find_modifier


class Switch(NamedTuple):
    """Options that switch a feature on: modifiers (`--apply`), then edits (`--set`)."""

    applied: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The options as on a command line."""
        words = [*(f"--apply {name}" for name in self.applied), *(f"--set {shlex.quote(edit)}" for edit in self.sets)]
        return " ".join(words)


_LOOPS, _TRAINING, _OBJECTIVE = "rl.rollout.agent_loops", "rl.training", "rl.objective"
_FROZEN = "trainer.reference=axlearn_like.training.alignment.reference:FrozenCopy"
_KL = ("objective.regulariser=rl.objective:ReferenceKL", "objective.regulariser.coef=0.01", _FROZEN)
_GAE = (f"objective.advantage={_OBJECTIVE}:GeneralisedAdvantage", "objective.zero_variance=keep")
_PLANS = (f"graph={_LOOPS}.graph.rollouts:GraphRollouts", f"trainer.packing={_TRAINING}.packing:Packing")

# A modifier that replaces the whole objective stands before those that edit it.
FEATURES: dict[str, Switch] = {
    "demonstrations": Switch(("luffy",)),
    "environments": Switch(
        sets=(
            "tasks.families.0=rl.environments.task:EnvironmentTask",
            "tasks.families.0.source=rl.tasks.family:TaskFamily",
            "tasks.families.0.source.name=products",
            "tasks.families.0.environment=rl.environments.tool_environment:ToolEnvironment",
        )
    ),
    "branching": Switch(sets=(f"branching={_LOOPS}.branching:Branching", "branching.at=(4,)")),
    "interruption": Switch(
        sets=(
            f"interruption={_LOOPS}.interruption:Interruption",
            "interruption.at=8",
            "interruption.until=;",
            "interruption.words=so;",
        )
    ),
    "plans": Switch(sets=_PLANS),
    "credit by node": Switch(
        sets=(
            *_PLANS,
            "graph.node_reward=experiments.tasks.expressions:right_sum",
            f"objective.advantage={_OBJECTIVE}:NodeAdvantage",
        )
    ),
    "candidate tokens": Switch(sets=("sampler=rl.rollout.sampling:RecordedSampler", "sampler.top_k=8")),
    "routing replay": Switch(("experts",), ("trainer.replay_routing=True",)),
    "packing": Switch(sets=(f"trainer.packing={_TRAINING}.packing:Packing",)),
    "several rows a prompt": Switch(sets=("trainer.samples_per_row=4",)),
    "mini-batches": Switch(
        sets=(
            "objective.old_policy=recompute",
            f"trainer.updates={_TRAINING}.updates:Updates",
            "trainer.updates.minibatches=2",
        )
    ),
    "KL to a reference": Switch(sets=_KL),
    "exact KL": Switch(
        sets=(
            *_KL,
            "objective.regulariser.estimator=exact",
            "objective.regulariser.ratio=none",
            "trainer.head_tile=2048",
        )
    ),
    "KL in the reward": Switch(
        sets=(
            f"objective.reward_shaping={_OBJECTIVE}:ReferencePenalty",
            "objective.reward_shaping.coef=0.01",
            _FROZEN,
        )
    ),
    "reference role": Switch(sets=(*_KL, "fleet.reference=cpu:1")),
    "length penalty": Switch(
        sets=(
            f"objective.reward_shaping={_OBJECTIVE}:SoftOverlongPenalty",
            "objective.reward_shaping.max_length=14",
            "objective.reward_shaping.buffer=4",
        )
    ),
    "critic": Switch(sets=(*_GAE, f"objective.advantage.critic={_TRAINING}.critic:Critic")),
    "shared critic": Switch(sets=(*_GAE, f"objective.advantage.critic={_TRAINING}.critic:SharedCritic")),
    "MaxRL": Switch(sets=(f"objective.advantage={_OBJECTIVE}:SuccessNormalisedAdvantage",)),
    "weights in flight": Switch(sets=("controller.weights=in_flight",)),
    "prompt pool": Switch(("prompt_pool",)),
    "dynamic sampling": Switch(("dynamic_sampling",)),
    "speculation": Switch(("speculation",)),
    "cascade": Switch(("cascade",)),
    "int8 rollouts": Switch(("int8_rollouts",)),
    "int8 KV cache": Switch(("int8_kv_cache",)),
    "low-rank adapters": Switch(("low_rank",)),
    "rows over devices": Switch(sets=('trainer.mesh={"sequence": 2}',)),
    "exact numerics": Switch(sets=("policy.numerics=exact",)),
    "int8 on the network": Switch(sets=("parameter_server.codec=int8",)),
    "evaluation during RL": Switch(sets=("evaluate_every=20",)),
    "another run's weights": Switch(
        sets=("start_from=axlearn_like.checkpoint.convert:StartFrom", "start_from.path=runs/other")
    ),
}


def switched(cfg: ConfigBase[Any], *features: str) -> Any:
    """Return a copy of an experiment with these features of `FEATURES` (UserError: it has no such field)."""
    changed, switches = cfg.clone(), [FEATURES[name] for name in features]
    for name in itertools.chain.from_iterable(switch.applied for switch in switches):
        find_modifier(name)(changed)
    # An edit that two features share would undo what the first adds to it.
    return apply_edits(changed, tuple(dict.fromkeys(itertools.chain.from_iterable(one.sets for one in switches))))


def refusal(cfg: ConfigBase[Any], *features: str) -> str | None:
    """Return why an experiment cannot have these features, in a run's own words; None: it can, as far as fields say.

    Args:
        features: names of `FEATURES`.
    """
    switches = [FEATURES[name] for name in features]
    for one, other in itertools.combinations(switches, 2):
        values = dict(edit.split("=", 1) for edit in one.sets)
        for path, value in (edit.split("=", 1) for edit in other.sets):
            if values.get(path, value) != value:
                return f"{path}: one value, {values[path]} or {value}"
    try:
        changed = switched(cfg, *features)
        check_values(changed)
        built = changed.build()
        for part in (built.engine_cfg, built.controller_cfg, built.trainer_cfg):
            check_values(part)
        built.trainer_cfg.check_axes(built.trainer_cfg.mesh)
    except ConfigError as error:
        return str(error).partition(", got ")[0].removeprefix(f"{path_of(cfg)}.")
    return None


def exclusions(cfg: ConfigBase[Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each feature that an experiment cannot have, then each two that exclude each other, with the reason."""
    fitting: list[str] = []
    for name in FEATURES:
        if (why := refusal(cfg, name)) is None:
            fitting.append(name)
        else:
            yield (name,), why
    for pair in itertools.combinations(fitting, 2):
        if (why := refusal(cfg, *pair)) is not None:
            yield pair, why


def tables(found: list[tuple[tuple[str, ...], str]]) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return rows of features with their options and what they exclude, and rows of exclusions with their reasons."""
    alone = {names[0] for names, _ in found if len(names) == 1}
    rows: list[tuple[str, str, str]] = []
    for name, switch in FEATURES.items():
        others = [other for names, _ in found if name in names for other in names if other != name]
        rows.append((name, switch.text, "not in this experiment" if name in alone else ", ".join(others) or "-"))
    return rows, [(" with ".join(names), why) for names, why in found]


PAGE = """# Features that exclude each other

Written by `axl config features --markdown`, which switches on each feature, and each two, in the experiment `demo` and
lists what a run would refuse. `axl config features EXPERIMENT` does the same in yours, and names what it cannot have.
Sizes, such as the number of samples, are checked too. Pairs that are not listed work together as far as their fields
say; a layer, a mesh or a kernel may refuse more.

{features}

## Reasons

{reasons}

## A feature of your own

A config anywhere in an experiment may have a method `requires(self, experiment)`, which refuses by `require` what does
not fit it; the experiment asks every part (`rl/protocol/experiment.py`). A row in `tools/features.py` shows it here.
"""


def page(found: list[tuple[tuple[str, ...], str]]) -> str:
    """Return the page of the documentation."""
    rows, reasons = tables(found)
    options = [(name, _code(text), excluded) for name, text, excluded in rows]
    return PAGE.format(
        features=_table(("feature", "options", "not with"), options),
        reasons=_table(("features", "what is expected"), [(names, _code(why)) for names, why in reasons]),
    )


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))
