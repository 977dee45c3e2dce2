"""`axl simulate EXPERIMENT`: hours, dollars and staleness of an RL run before it is paid for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mesh.errors import UserError, once
from tools.commands import options_as
from tools.experiment import LocalPath, edit_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl.experiment import RLExperiment
    from rl.fleet.fleet import Placed
    from rl.runtime.simulated.failures import Failure
    from rl.runtime.simulated.simulation import SimulationPlan

_NO_PRICES = "--objective cost: there are no prices; expected --price CHIP=DOLLARS an hour"


@dataclasses.dataclass(frozen=True)
class SimulateOptions:
    """Options of `axl simulate` beside the experiment's."""

    fleets: tuple[str, ...]
    workers: int | None
    staleness: int | None
    updates: int | None
    hours: float
    durations: str | None
    edits: tuple[str, ...]
    prices: tuple[str, ...]
    lengths: str
    growth: float
    traces: tuple[Path, ...]
    zones: int
    rates: tuple[str, ...]
    back_s: float


@dataclasses.dataclass(frozen=True)
class ShownOptions:
    """Options of what to simulate, and where it goes."""

    search: str | None
    objective: str
    advice: bool
    run_dir: Path | None
    as_json: bool


@click.command("simulate")
@edit_options
@click.option("--fleet", "fleets", metavar="ROLE=DEVICES,...", multiple=True, help="Devices of the roles, as of axl "
              "rl. Repeated: each fleet is simulated, and the best is listed first.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), help="Number of workers.  [default: the experiment's]")
@click.option("--staleness", type=click.IntRange(min=0), help="Updates that a rollout may be behind the trainer.")
@click.option("--updates", type=click.IntRange(min=1), help="Number of updates.  [default: the experiment's]")
@click.option("--hours", type=float, default=12.0, show_default=True, help="End of the simulation, if not before.")
@click.option("--durations", metavar="SOURCE", help="A TOML or JSON table of seconds, bytes a second and prices; a run "
              "directory, whose events are measured; or compiled: the compiler's estimates for --fleet.")  # fmt: skip
@click.option("--duration", "edits", multiple=True, metavar="NAME=NUMBER", help="Change one of them. May be repeated.")
@click.option("--price", "prices", multiple=True, metavar="CHIP=DOLLARS", help="Price of a chip of a kind for an hour, "
              "such as v5p=4.2. May be repeated.")  # fmt: skip
@click.option("--lengths", default="", metavar="SOURCE", help="Tokens of answers: lognormal:MEAN,SIGMA, fixed:TOKENS, "
              "a file of numbers, or a run directory.  [default: fixed, half of max_new_tokens]")  # fmt: skip
@click.option("--growth", default=0.0, help="Share by which answers grow until the last update.")
@click.option("--trace", "traces", type=LocalPath(path_type=Path, exists=True, dir_okay=False), multiple=True, help=
              "Failures: CSV or JSON lines of time, target (trainer, controller, worker, worker-N, zone-N), kind "
              "(kill, gone, back, slow); or spot instances by time, as SkyPilot, Bamboo and Parcae publish them, a "
              "file a zone.")  # fmt: skip
@click.option(
    "--zones", type=click.IntRange(min=1), default=1, show_default=True, help="Zones that workers are dealt to."
)
@click.option("--rate", "rates", multiple=True, metavar="ROLE=N", help="Random deaths an hour: of trainer, controller, "
              "or of all workers together. May be repeated.")  # fmt: skip
@click.option("--back-s", default=0.0, help="With --rate worker=N: seconds for which a lost worker's host is gone, on "
              "average.")  # fmt: skip
@click.option("--search", metavar="workers=A..B|KIND=CHIPS,...", help="Simulate fleets of so many workers; or of chips "
              "such as v5e=16,v6e=8: which of them train, and which draw. The best first.")  # fmt: skip
@click.option(
    "--objective",
    type=click.Choice(["cost", "time"]),
    default="time",
    show_default=True,
    help="Order of --search and of several fleets.",
)
@click.option("--advice", is_flag=True, help="Simulate changes too: a worker more or less, another staleness, another "
              "checkpoint interval.")  # fmt: skip
@click.option("--run-dir", type=LocalPath(path_type=Path), help="Write events and metrics there, for axl report.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@options_as(how=SimulateOptions, shown=ShownOptions)
def command(
    experiment: str, sets: tuple[str, ...], applied: tuple[str, ...], how: SimulateOptions, shown: ShownOptions
) -> None:
    """Simulate the control plane of EXPERIMENT by a virtual clock: what a run would take, cost, and survive.

    The controller, leases, workers' loops, the weights' directory and broadcast, publication and restarts are those of
    axl rl; only the work of devices, verifiers and transfers is replaced by durations. Same arguments, same result.
    """
    from mesh.imports import many_imports

    with many_imports():
        from rl.runtime.simulated import advice
        from rl.runtime.simulated.failures import read_rate
        from rl.runtime.simulated.sources.prices import read_prices
        from tools.fleet import load_placed

    by_workers = shown.search is not None and (shown.search.startswith("worker") or ".." in shown.search)
    counts = advice.worker_counts(shown.search or "") if by_workers else ()
    _check_shown(how, shown, counts)
    prices = read_prices(how.prices)
    known = bool(prices) or how.durations != "compiled" or any("_price" in edit for edit in how.edits)
    if shown.objective == "cost" and not known:
        raise UserError(_NO_PRICES)
    load = lambda fleet: load_placed(experiment, sets, None, applied, fleet)  # noqa: E731
    placed, refused = _fleets(load, how, None if by_workers else shown.search)
    rates = once("--rate", map(read_rate, how.rates))
    plans = _plans(placed, how, prices, rates)
    if how.durations is None:
        edits = f" but {', '.join(how.edits)}" if how.edits else ""
        click.echo(
            f"durations are defaults{edits}, not measured ones: --durations RUN takes those of a run, --durations "
            "compiled the compiler's for TPUs, --duration NAME=NUMBER changes one",
            err=True,
        )
    if by_workers:
        sized = [advice.of_sizes(name, plan, counts) for name, plan in plans.items()]
        plans = {name: plan for one in sized for name, plan in one.items()}
    if len(plans) > 1 or shown.search is not None:
        durations = [plan.durations for plan in plans.values()]
        if shown.objective == "cost" and not all(d.worker_price or d.trainer_price for d in durations):
            raise UserError(_NO_PRICES)
        rows = advice.ranked(plans, shown.objective)
        return _show({"objective": shown.objective, "fleets": rows, "refused": refused}, shown)
    (plan,) = plans.values()
    found = _simulated(plan, shown)
    if shown.advice:
        found["advice"] = advice.advise(plan, found, rates.get("trainer", 0.0) + rates.get("controller", 0.0))
    return _show(found, shown)


def _check_shown(how: SimulateOptions, shown: ShownOptions, counts: Sequence[int]) -> None:
    """Refuse options that have no effect together, and the directory of another run (UserError)."""
    if shown.search is not None or len(how.fleets) > 1:
        given = {"--run-dir": shown.run_dir is not None, "--advice": shown.advice, "--workers": counts and how.workers}
        for option in [name for name, there in given.items() if there]:
            raise UserError(f"{option}: several fleets are simulated; expected one --fleet and no --search with it")
    if shown.run_dir is not None:
        from rl.runtime.simulated.simulation import check_new

        check_new(shown.run_dir)


def _simulated(plan: SimulationPlan, shown: ShownOptions) -> dict[str, Any]:
    """Simulate a plan, with the ETTR where something fails."""
    from axlearn_like.run.scratch import scratch
    from rl.runtime.simulated.result import ettr, summarise
    from rl.runtime.simulated.simulation import simulate

    with scratch("simulate") as folder:
        done = simulate(plan, shown.run_dir or folder / "run")
        found = summarise(done)
        if plan.failures:
            found |= ettr(done)
    return found | {"durations": dataclasses.asdict(plan.durations)}


def _fleets(
    load: Callable[[str | None], Placed[Any]], how: SimulateOptions, chips: str | None
) -> tuple[dict[str, Placed[Any]], dict[str, str]]:
    """Return the experiment on each fleet by its text, and why others cannot run it; refuses wrong options first.

    `chips`: those of which fleets are made, as of --search.
    """
    from rl.fleet.plan import plan_fleet, refuse
    from rl.runtime.simulated.sources.chips import fleets_that_fit, read_chips

    if (len(how.fleets) > 1 or chips is not None) and how.durations != "compiled":
        given = f"--search {chips}: fleets" if chips else "--fleet: several"
        raise UserError(f"{given} have durations of their own; expected --durations compiled, or one fleet")
    if how.traces and how.rates:
        raise UserError("--trace and --rate are both of failures; expected one of them")
    if chips is None:
        return {text or "": load(text) for text in how.fleets or (None,)}, {}
    numbers = read_chips(chips)
    if how.fleets or how.workers is not None:
        raise UserError(f"--search {chips} makes fleets of these chips; expected no --fleet and no --workers")
    return fleets_that_fit(numbers, load, lambda placed: refuse(plan_fleet(placed)))


def _plans(
    placed: dict[str, Placed[Any]], how: SimulateOptions, prices: dict[str, float], rates: dict[str, float]
) -> dict[str, SimulationPlan]:
    """Return the plan of each fleet by its text; refuses what does not fit before a program is compiled."""
    from rl.runtime.simulated.failures import read_traces, synthetic
    from rl.runtime.simulated.sources.prices import check_prices

    check_prices([one.fleet for one in placed.values()], prices)
    plans: dict[str, SimulationPlan] = {}
    for text, one in placed.items():
        _edit(one.cfg, how)
        failures = synthetic(rates, how.hours, one.cfg.seed, back_s=how.back_s) if rates else []
        if how.traces:
            failures = read_traces(how.traces, one.cfg.workers, how.zones)
        plans[text] = _plan(one, how, failures)
    return {text: _timed(plan, placed[text], how, prices) for text, plan in plans.items()}


def _edit(cfg: RLExperiment.Config, how: SimulateOptions) -> None:
    known = {"workers": how.workers, "staleness": how.staleness, "num_steps": how.updates}
    cfg.set(**{name: value for name, value in known.items() if value is not None})
    cfg.parameter_server.set(keep=max(cfg.parameter_server.keep, cfg.staleness + 2))


def _plan(placed: Placed[Any], how: SimulateOptions, failures: list[Failure]) -> SimulationPlan:
    """Return the plan of a fleet, with default durations."""
    from rl.runtime.simulated.durations import Durations
    from rl.runtime.simulated.lengths import read_lengths
    from rl.runtime.simulated.simulation import SimulationPlan

    cfg = placed.cfg
    lengths = read_lengths(
        how.lengths or f"fixed:{max(1, cfg.max_new_tokens // 2)}", cfg.max_new_tokens, cfg.seed, how.growth
    )
    plan = SimulationPlan(cfg, Durations().changed(how.edits), lengths, how.hours, failures)
    plan.check()
    return plan


def _timed(plan: SimulationPlan, placed: Placed[Any], how: SimulateOptions, prices: dict[str, float]) -> SimulationPlan:
    """Return the plan with the durations and prices of its fleet."""
    from rl.runtime.simulated.sources.given import given_durations
    from rl.runtime.simulated.sources.prices import priced

    if how.durations == "compiled":
        click.echo(f"compiling for {placed.fleet.trainer.text} and {placed.fleet.worker.text}: minutes, once", err=True)
    durations = given_durations(how.durations, placed)
    durations = (priced(durations, placed.fleet, prices) if prices else durations).changed(how.edits)
    return dataclasses.replace(plan, durations=durations)


def _show(found: dict[str, Any], shown: ShownOptions) -> None:
    from rl.runtime.simulated.result import in_words

    if shown.as_json:
        return click.echo(json.dumps(found))
    click.echo("\n".join(in_words(found)))
    if shown.run_dir is not None:
        click.echo(f"axl report {shown.run_dir} shows it")
    return None
