"""The sections of the page that are curves over steps, with captions that describe good ones."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tools.report import svg
from tools.report.cards import Sheet, bars
from tools.report.charts import FULL, Curve, curves, episode_multiples, small_multiples, term_multiples
from tools.report.load import Points, Run, mapping, number
from tools.report.table import goodput_card
from tools.report.words import duration, label

_TRANSFER_KINDS = ("median", "max")
_TRANSFERS = {
    "push": "from an update's end until its version could be pulled",
    "transfer": "of a version to a worker's devices, most of it beside drawing",
    "wait": "of a worker for a version that was not there yet",
    "pause": "in which a worker did not draw because of new weights",
    "age": "of a version, since its publication, when a worker began to use it",
}
_SHARE: dict[str, Any] = {"y_format": svg.percent_label}
_CAPTIONS = {
    "Loss": "Cross-entropy per target token. Good: falls fast, then slowly, without jumps up.",
    "Token accuracy": "Share of target tokens that are the most likely one. Good: rises, and stops short of 100 % so "
    "that RL has work left.",
    "Staleness": "Updates between the weights that sampled and those that learn; lines are moving means. Good: flat, "
    "and no dot above the bound that the config sets.",
    "Trainer-sampler log-prob difference": "Absolute difference for the same token and the same weights. Good: at "
    "rounding level (1e-5 or less in float32, about 1e-2 in bfloat16) and not growing; zeros lie on the floor.",
    "Importance ratio": "Mean probability ratio of the learning to the sampling policy. Good: close to 1.",
    "Clipped tokens": "Share of tokens whose ratio was clipped. Good: a few per cent at most.",
    "KL, sampling to learning policy": "Good: small and level; it grows with staleness.",
    "Effective sample size": "Share of the tokens that an importance-weighted mean is worth. Good: close to 100 %.",
    "Seconds per step": "A whole step, and the parts of it that the trainer waited for samples and for the reference "
    "role, if there is one. Good: waiting is a small part.",
    "Supervised throughput": "Learned per second of wall time. Good: level.",
    "MFU": "Model FLOPs against the peak of the devices, causal attention by half. Good: level, and 40 % or more.",
    "Entropy": "Of the policy per token. Good: declines gently; a fall to zero is collapse.",
    "Completion length": "Means over the batch; right is a reward of trainer.correct_threshold or more, truncated "
    "counts apart. Good: no drift to the limit, and wrong answers that do not grow while right ones stay.",
    "Groups without signal, answers cut short": "Groups whose samples all got the same reward teach nothing; answers "
    "at the length limit are cut. Good: both stay well below half.",
    "Gradient norm": "Before clipping. Good: steady; lone spikes are clipped.",
    "KL, old to new policy": "Good: small and level.",
    "Learning rate": "Good: as scheduled.",
    "Gradient norm by group of layers": "Before clipping. Good: none falls to zero, and none grows while others stay.",
}


class Card(NamedTuple):
    """A card of curves."""

    heading: str  # heading, with a caption above; also the label of the curve, if that has none
    unit: str  # name and unit of the vertical axis
    # Label, metric and style of each curve; `worst` after a style thins by maximum, `line` leaves out dots
    metrics: tuple[tuple[str, str, str], ...]
    options: Mapping[str, Any] = {}  # other fields of ``charts.Axis``
    phase: str = "rl"  # sft or rl

    def draw(self, run: Run) -> str:
        """Return it as markup; an empty string if the run has none of its metrics."""
        drawn = []
        for name, key, style in self.metrics:
            colour, _, kind = style.partition(" ")
            values = run.series(self.phase, key)
            drawn.append(Curve(name or self.heading.lower(), values, colour, raw=kind != "line", worst=kind == "worst"))
        caption, rl = _CAPTIONS[self.heading], self.phase == "rl"
        return curves(run, self.heading, caption, drawn, y_label=self.unit, events=rl, **self.options)


_DIFFERENCES = (
    ("mean", "logprob_diff_mean", "c1"),
    ("largest", "logprob_diff_max", "c6 worst"),
    ("largest, scored in the sampler's order", "scoring_diff_max", "c2 worst"),
)
_WAITS = (
    ("step", "step_seconds", "c1"),
    ("of it waiting", "wait_seconds", "muted"),
    ("for the reference", "reference_wait_seconds", "c4"),
)
_OUTCOMES = (("right", "c2"), ("wrong", "c6"), ("truncated", "c3"))
_LENGTHS = ("all", "completion_length", "muted"), *((name, f"completion_length/{name}", one) for name, one in _OUTCOMES)
_CUT = ("zero variance", "zero_variance_fraction", "c5"), ("cut short", "truncation_fraction", "c3")
_SFT = (
    Card("Loss", "nats per token", (("", "loss", "c1"),), phase="sft"),
    Card("Token accuracy", "share", (("", "accuracy", "c2"),), _SHARE, "sft"),
)
_OFF_POLICY = (
    Card("Staleness", "versions", (("mean", "staleness_mean", "c1"), ("oldest sample", "staleness_max", "c6 worst"))),
    Card("Trainer-sampler log-prob difference", "nats, log scale", _DIFFERENCES, {"log": True}),
    Card("Importance ratio", "ratio", (("", "ratio_mean", "c5"),), {"reference": 1.0}),
    Card("Clipped tokens", "share", (("", "clip_fraction", "c3"),), _SHARE),
    Card("KL, sampling to learning policy", "nats per token", (("", "kl_mu_pi", "c3"),)),
    Card("Effective sample size", "share", (("", "ess", "c2"),), {**_SHARE, "reference": 1.0}),
)
_SPEED = (
    Card("Seconds per step", "seconds", _WAITS),
    Card("Supervised throughput", "tokens/s", (("", "tokens_per_second", "c2"),), phase="sft"),
    Card("MFU", "share", (("", "mfu", "c1"),), _SHARE, "sft"),
)
_HEALTH = (
    Card("Entropy", "nats", (("", "entropy", "c1"),)),
    Card("Completion length", "tokens", _LENGTHS),
    Card("Groups without signal, answers cut short", "share", _CUT, _SHARE),
    Card("Gradient norm", "norm", (("", "grad_norm", "c6"),)),
    Card("KL, old to new policy", "nats per token", (("", "kl_old_new", "c3"),)),
    Card("Learning rate", "rate", (("", "lr", "c8 line"),)),
)


def reward(run: Run) -> str:
    """Return the mean reward over RL steps, then one small plot per task family and per term of the reward."""
    values = run.series("rl", "reward")
    low, high = svg.limits([value for _, value in values])
    whole = curves(
        run,
        "Mean reward of a batch",
        "Dots are single steps, the line a moving mean; dashed red is a kill, green its "
        "replacement. Good: it climbs and flattens, and the kill leaves no dent.",
        [Curve("reward", values, "accent")],
        y_label="reward",
        size=FULL,
        y=(max(low, 0.0), min(high, 1.0) if high <= 1.1 else high),
    )
    parts = (
        ("By task family", "Same axes everywhere. Good: none falls while the others rise.", small_multiples(run)),
        ("By term", "Means of a batch, before weights and gates.", term_multiples(run)),
        (
            "Episodes",
            "Means of an episode; failures are those of environments in a batch, which are no rewards.",
            episode_multiples(run),
        ),
    )
    return whole + "".join(
        f'<h3 class="sub">{heading}</h3><p class="lead">{lead}</p>{plots}' for heading, lead, plots in parts if plots
    )


def sft(run: Run) -> str:
    """Return loss and token accuracy of supervised fine-tuning."""
    return _grid(*(card.draw(run) for card in _SFT), _grad_norms(run, "sft"))


def off_policy(run: Run) -> str:
    """Return the distance of the samples from the policy that learns from them, and of sampler from trainer."""
    return _grid(*(card.draw(run) for card in _OFF_POLICY))


def speed(run: Run) -> str:
    """Return tokens per second, seconds per step and seconds per phase."""
    tokens = curves(
        run,
        "Throughput",
        "Tokens per second of wall time. Good: level; a kill costs a dip, not a stop.",
        [
            Curve("generated", _per_second(run, "gen_tokens"), "c2"),
            Curve("trained on", _per_second(run, "train_tokens"), "c1"),
        ],
        y_label="tokens/s",
    )
    cards = _grid(tokens, *(card.draw(run) for card in _SPEED))
    return cards + weight_transfers(run) + _phases(run) + goodput_card(run)


def health(run: Run) -> str:
    """Return the curves of exploration, of learning from groups and of the size of updates."""
    return _grid(*(card.draw(run) for card in _HEALTH), _grad_norms(run, "rl"))


def _per_second(run: Run, key: str) -> Points:
    rates = []
    for row in run.rows("rl"):
        amount, seconds = number(row.get(key)), number(row.get("step_seconds"))
        if amount is not None and seconds:
            rates.append((float(row["step"]), amount / seconds))
    return rates


def _phases(run: Run) -> str:
    seconds = mapping(run.report.get("phase_seconds"))
    spent = {key: number(value) for key, value in seconds.items()}
    known = {key: value for key, value in spent.items() if value is not None}
    order = [key for key in ("setup", "sft", "eval_before", "rl", "eval_after") if key in known]
    order += [key for key in known if key not in order]
    total = number(run.report.get("seconds"))
    note = f"{duration(total)} in all" if total is not None else ""
    return bars("Wall time by phase", note, {label(key): (known[key], duration(known[key])) for key in order})


def _grad_norms(run: Run, phase: str) -> str:
    """Return the gradient norm of each group of layers, on a common logarithmic axis."""
    keys = sorted({key for row in run.rows(phase) for key in row if key.startswith("grad_norm/")})
    named = ((key.partition("/")[2].replace("_", " "), key, f"c{at}") for at, key in enumerate(keys, start=1))
    return Card("Gradient norm by group of layers", "norm, log scale", tuple(named), {"log": True}, phase).draw(run)


def _grid(*figures: str) -> str:
    kept = "".join(figures)
    return f'<div class="grid2">{kept}</div>' if kept else ""


def weight_transfers(run: Run) -> str:
    """Return the seconds of each stage of a weight transfer, and bytes; nothing if the run has no report yet."""
    figures = mapping(run.report.get("weights"))
    rows = [
        (name, what, *(f"{number(mapping(figures[name]).get(kind)) or 0.0:.3f}" for kind in _TRANSFER_KINDS))
        for name, what in _TRANSFERS.items()
        if name in figures
    ]
    pulled, travelled = (number(figures.get(name)) or 0.0 for name in ("pulled_bytes", "network_bytes"))
    below = (
        f"<p>{pulled / 1e6:,.1f} MB pulled, of which {travelled / 1e6:,.1f} MB "
        "travelled over sockets; the rest was mapped or encoded away.</p>"
    )
    return Sheet("Weights on their way", ("seconds", "", *_TRANSFER_KINDS), rows, numeric=(2, 3)).card(below)
