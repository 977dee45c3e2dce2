"""The sections of the page that are curves over steps, with captions that describe good ones."""

from __future__ import annotations

from html import escape
from typing import Any

from tools.report import goodput, svg
from tools.report.cards import bars, table, table_card
from tools.report.charts import FULL, Curve, curves, episode_multiples, small_multiples, term_multiples
from tools.report.load import Points, Run, mapping, number
from tools.report.words import duration, label

_TRANSFER_KINDS = ("median", "max")
_TRANSFERS = {
    "push": "from an update's end until its version could be pulled",
    "transfer": "of a version to a worker's devices, most of it beside drawing",
    "wait": "of a worker for a version that was not there yet",
    "pause": "in which a worker did not draw because of new weights",
    "age": "of a version, since its publication, when a worker began to use it",
}


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
    minis = small_multiples(run)
    if minis:
        minis = (
            '<h3 class="sub">By task family</h3><p class="lead">Same axes everywhere. Good: none '
            f"falls while the others rise.</p>{minis}"
        )
    terms = term_multiples(run)
    if terms:
        terms = f'<h3 class="sub">By term</h3><p class="lead">Means of a batch, before weights and gates.</p>{terms}'
    episodes = episode_multiples(run)
    if episodes:
        lead = "Means of an episode; failures are those of environments in a batch, which are no rewards."
        episodes = f'<h3 class="sub">Episodes</h3><p class="lead">{lead}</p>{episodes}'
    return whole + minis + terms + episodes


def sft(run: Run) -> str:
    """Return loss and token accuracy of supervised fine-tuning."""
    loss = _one(
        run,
        "Loss",
        "Cross-entropy per target token. Good: falls fast, then slowly, without jumps up.",
        "loss",
        "c1",
        "nats per token",
        phase="sft",
    )
    accuracy = _one(
        run,
        "Token accuracy",
        "Share of target tokens that are the most likely one. Good: rises, and stops short of "
        "100 % so that RL has work left.",
        "accuracy",
        "c2",
        "share",
        phase="sft",
        y_format=svg.percent_label,
    )
    return _grid(loss, accuracy, _grad_norms(run, "sft"))


def off_policy(run: Run) -> str:
    """Return the distance of the samples from the policy that learns from them, and of sampler from trainer."""
    staleness = curves(
        run,
        "Staleness",
        "Updates between the weights that sampled and those that learn; lines are moving means. "
        "Good: flat, and no dot above the bound that the config sets.",
        [
            Curve("mean", run.series("rl", "staleness_mean"), "c1"),
            Curve("oldest sample", run.series("rl", "staleness_max"), "c6", worst=True),
        ],
        y_label="versions",
    )
    mismatch = curves(
        run,
        "Trainer-sampler log-prob difference",
        "Absolute difference for the same token and the same weights. Good: at rounding level "
        "(1e-5 or less in float32, about 1e-2 in bfloat16) and not growing; zeros lie on the "
        "floor.",
        [
            Curve("mean", run.series("rl", "logprob_diff_mean"), "c1"),
            Curve("largest", run.series("rl", "logprob_diff_max"), "c6", worst=True),
            Curve("largest, scored in the sampler's order", run.series("rl", "scoring_diff_max"), "c2", worst=True),
        ],
        y_label="nats, log scale",
        log=True,
    )
    ratio = _one(
        run,
        "Importance ratio",
        "Mean probability ratio of the learning to the sampling policy. Good: close to 1.",
        "ratio_mean",
        "c5",
        "ratio",
        reference=1.0,
    )
    clipped = _one(
        run,
        "Clipped tokens",
        "Share of tokens whose ratio was clipped. Good: a few per cent at most.",
        "clip_fraction",
        "c3",
        "share",
        y_format=svg.percent_label,
    )
    divergence = _one(
        run, "KL, sampling to learning policy", "Good: small and level; it grows with staleness.", "kl_mu_pi", "c3",
        "nats per token",
    )  # fmt: skip
    ess = _one(
        run,
        "Effective sample size",
        "Share of the tokens that an importance-weighted mean is worth. Good: close to 100 %.",
        "ess",
        "c2",
        "share",
        y_format=svg.percent_label,
        reference=1.0,
    )
    return _grid(staleness, mismatch, ratio, clipped, divergence, ess)


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
    waits = curves(
        run,
        "Seconds per step",
        "A whole step, and the parts of it that the trainer waited for samples and for the reference role, if there is "
        "one. Good: waiting is a small part.",
        [
            Curve("step", run.series("rl", "step_seconds"), "c1"),
            Curve("of it waiting", run.series("rl", "wait_seconds"), "muted"),
            Curve("for the reference", run.series("rl", "reference_wait_seconds"), "c4"),
        ],
        y_label="seconds",
    )
    return _grid(tokens, waits, *_supervised(run)) + weight_transfers(run) + _phases(run) + goodput.section(run)


def _supervised(run: Run) -> tuple[str, str]:
    """Return speed and utilisation of supervised training."""
    words = "Learned per second of wall time. Good: level."
    used = "Model FLOPs against the peak of the devices, causal attention by half. Good: level, and 40 % or more."
    return (
        _one(run, "Supervised throughput", words, "tokens_per_second", "c2", "tokens/s", phase="sft"),
        _one(run, "MFU", used, "mfu", "c1", "share", phase="sft", y_format=svg.percent_label),
    )


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


def health(run: Run) -> str:
    """Return the curves of exploration, of learning from groups and of the size of updates."""
    groups = curves(
        run,
        "Groups without signal, answers cut short",
        "Groups whose samples all got the same reward teach nothing; answers at the length limit "
        "are cut. Good: both stay well below half.",
        [
            Curve("zero variance", run.series("rl", "zero_variance_fraction"), "c5"),
            Curve("cut short", run.series("rl", "truncation_fraction"), "c3"),
        ],
        y_label="share",
        y_format=svg.percent_label,
    )
    lengths = curves(
        run,
        "Completion length",
        "Means over the batch; right is a reward of trainer.correct_threshold or more, truncated counts apart. Good: "
        "no drift to the limit, and wrong answers that do not grow while right ones stay.",
        [
            Curve("all", run.series("rl", "completion_length"), "muted"),
            *(
                Curve(outcome, run.series("rl", f"completion_length/{outcome}"), style)
                for outcome, style in (("right", "c2"), ("wrong", "c6"), ("truncated", "c3"))
            ),
        ],
        y_label="tokens",
    )
    entropy = "Of the policy per token. Good: declines gently; a fall to zero is collapse."
    norm = "Before clipping. Good: steady; lone spikes are clipped."
    return _grid(
        _one(run, "Entropy", entropy, "entropy", "c1", "nats"),
        lengths,
        groups,
        _one(run, "Gradient norm", norm, "grad_norm", "c6", "norm"),
        _one(
            run, "KL, old to new policy", "Good: small and level.",
            "kl_old_new", "c3", "nats per token",
        ),
        _one(run, "Learning rate", "Good: as scheduled.", "lr", "c8", "rate", raw=False),
        _grad_norms(run, "rl"),
    )  # fmt: skip


def _grad_norms(run: Run, phase: str) -> str:
    """Return the gradient norm of each group of layers, on a common logarithmic axis."""
    keys = dict.fromkeys(key for row in run.rows(phase) for key in row if key.startswith("grad_norm/"))
    return curves(
        run,
        "Gradient norm by group of layers",
        "Before clipping. Good: none falls to zero, and none grows while the others stay.",
        [
            Curve(key.partition("/")[2].replace("_", " "), run.series(phase, key), f"c{number}")
            for number, key in enumerate(sorted(keys), start=1)
        ],
        y_label="norm, log scale",
        log=True,
        events=phase == "rl",
    )


def _one(
    run: Run,
    heading: str,
    caption: str,
    key: str,
    style: str,
    unit: str,
    *,
    phase: str = "rl",
    raw: bool = True,
    **options: Any,
) -> str:
    """Return a card with the single curve of one metric; ``options`` as for ``curves``."""
    curve = Curve(heading.lower(), run.series(phase, key), style, raw=raw)
    return curves(run, heading, caption, [curve], y_label=unit, events=phase == "rl", **options)


def _grid(*figures: str) -> str:
    kept = "".join(figures)
    return f'<div class="grid2">{kept}</div>' if kept else ""


def weight_transfers(run: Run) -> str:
    """Return the seconds of each stage of a weight transfer, and bytes; nothing if the run has no report yet."""
    figures = mapping(run.report.get("weights"))
    rows = [
        [name, escape(what), *(f"{number(mapping(figures[name]).get(kind)) or 0.0:.3f}" for kind in _TRANSFER_KINDS)]
        for name, what in _TRANSFERS.items()
        if name in figures
    ]
    pulled, travelled = (number(figures.get(name)) or 0.0 for name in ("pulled_bytes", "network_bytes"))
    below = (
        f"<p>{pulled / 1e6:,.1f} MB pulled, of which {travelled / 1e6:,.1f} MB "
        "travelled over sockets; the rest was mapped or encoded away.</p>"
    )
    return table_card("Weights on their way", table(("seconds", "", *_TRANSFER_KINDS), rows, numeric=(2, 3)), below)
