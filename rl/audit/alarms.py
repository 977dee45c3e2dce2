"""Alarms: rules by which the metrics of the updates tell that a run fails to learn, for the terminal and the report."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any, override

from axlearn_like.config import ConfigBase, Configurable, config_items
from rl.audit.alarm_rules import EachUpdate, Level, MissingTerms, Row, Rule

_COMPARED = ("mean", "max")


class Alarms(Configurable):
    """Rules over the rows of a run, as these come, and what they have found so far.

    Limits are of means over `window` updates; None: no such alarm.
    """

    class Config(ConfigBase["Alarms"]):
        window: int = 10  # updates in each mean
        margin: float = 0.1  # fraction of its limit by which a mean must come back before its alarm is over
        entropy: float | None = 0.25  # least entropy, as a fraction of that of the first `window` updates
        truncation: float | None = 0.5  # limit of truncation_fraction
        zero_variance: float | None = 0.9  # limit of zero_variance_fraction
        clipping: float | None = 0.5  # limit of clip_fraction
        rejection: float | None = 0.3  # limit of importance_dropped_fraction
        ess: float | None = 0.5  # least effective sample size
        missing_term: int | None = 20  # updates without a value for a term of the reward that had one

        @override
        def check_fields(self) -> None:
            self.require_least(1, "window", "missing_term")
            self.require("margin", 0 <= self.margin < 1, "0 or more and below 1")
            for field in ("entropy", "truncation", "zero_variance", "clipping", "rejection", "ess"):
                limit = getattr(self, field)
                self.require(field, limit is None or 0 < limit < 1, "a fraction between 0 and 1, or None for no alarm")

    def __init__(self, cfg: Config):
        self._rules, self._window = _rules(cfg), cfg.window
        self._steps: dict[str, list[int]] = {rule.name: [] for rule in self._rules}  # updates with the alarm on
        self._on: set[str] = set()

    def observe(self, row: Row) -> Iterator[str]:
        """Yield the lines to show after an update, which is counted.

        Each alarm has one when it begins and one when it is over. An alarm of single updates is over after `window`
        updates without it, and has one at its 2nd, 4th, 8th ... update, too.
        """
        for rule in self._rules:
            name, found = rule.name, rule.observe(row)
            if found is None:
                if name in self._on and (rule.lasting or row["step"] >= self._steps[name][-1] + self._window):
                    self._on.remove(name)
                    yield f"alarm {name} is over at update {row['step']}"
                continue
            began = name not in self._on
            self._on.add(name)
            self._steps[name].append(row["step"])
            count = len(self._steps[name])
            if began or (not rule.lasting and count & (count - 1) == 0):
                times = f", {count} times by now" if count > 2 and not rule.lasting else ""
                yield f"alarm {name} at update {row['step']}{times}: {f'{found}: ' if found else ''}{rule.meaning}"

    def raised(self) -> dict[str, dict[str, Any]]:
        """Return the alarms that were on: number of updates, steps of the first and the last, and the meaning."""
        return {
            rule.name: {"count": len(steps), "first": steps[0], "last": steps[-1], "meaning": rule.meaning}
            for rule in self._rules
            if (steps := self._steps[rule.name])
        }


def raised_alarms(rows: Sequence[Row], settings: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return `Alarms.raised` after these rows.

    `settings`: values of the run's config by their paths (`alarms.window` ...); those that are not there have defaults.
    """
    cfg = Alarms.Config()
    given = {field: (settings or {}).get(f"alarms.{field}", default) for field, default in config_items(cfg)}
    alarms = cfg.set(**given).build()
    for row in rows:
        for _ in alarms.observe(row):
            pass
    return alarms.raised()


_EACH_UPDATE = (
    EachUpdate(
        "empty_batch",
        lambda row: row.get("updates") == 0,
        "nothing in the batch had a gradient, so nothing was updated (zero_variance_fraction, unscored_fraction and "
        "truncation_fraction say why)",
    ),
    EachUpdate(
        "audit",
        lambda row: row.get("audit_failures", 0) > 0,
        "rollouts were others when another worker drew them again: stale or cheaper weights, or a host that errs "
        "(events `audit_failed` and `quarantined` name worker, prompt and sample)",
    ),
    EachUpdate(
        "numerics_drift",
        lambda row: any(
            row.get(f"logprob_diff_{of}", 0) > row.get(f"logprob_diff_{of}_bound", inf) for of in _COMPARED
        ),
        "trainer and sampler disagree on log-probabilities of the same weights by more than rounding explains "
        "(logprob_diff_mean and _max against their _bound): importance ratios are wrong by as much",
    ),
)
# Name of an alarm whose limit is a greatest value: metric, meaning. The field of its limit has the alarm's name.
_AT_MOST = {
    "truncation": (
        "truncation_fraction",
        "most answers are cut off before they end: raise max_new_tokens, or shape the reward by length",
    ),
    "zero_variance": (
        "zero_variance_fraction",
        "nearly all groups have equal rewards and teach nothing: problems are too easy, too hard, or scored wrong",
    ),
    "clipping": (
        "clip_fraction",
        "most of the loss has no gradient: fewer updates a batch, a lower learning rate, or less staleness",
    ),
    "rejection": (
        "importance_dropped_fraction",
        "much of the batch is dropped by its importance weight: less staleness, or look at numerics_drift",
    ),
}


def _rules(cfg: Alarms.Config) -> list[Rule]:
    """Return the rules in the order in which they are shown."""
    options: Any = {"window": cfg.window, "margin": cfg.margin}
    rules: list[Rule] = [*_EACH_UPDATE]
    if cfg.entropy is not None:
        meaning = "the policy hardly explores: lower the learning rate, widen the upper clip, or add an EntropyBonus"
        rules.append(Level("entropy", "entropy", cfg.entropy, meaning, below=True, of_start=True, **options))
    for name, (metric, meaning) in _AT_MOST.items():
        if (limit := getattr(cfg, name)) is not None:
            rules.append(Level(name, metric, limit, meaning, **options))
    if cfg.ess is not None:
        meaning = (
            "few tokens have most of the importance weight, so gradients are noisy: less staleness, or truncate it"
        )
        rules.append(Level("ess", "ess", cfg.ess, meaning, below=True, **options))
    if cfg.missing_term is not None:
        rules.append(MissingTerms(cfg.missing_term))
    return rules
