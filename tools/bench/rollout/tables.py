"""The result of `axl bench rollout` as tables, for the console and for the page of figures in the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tools.bench.rollout.benchmark import describe_job


class Table(NamedTuple):
    """A table of cells as text; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return a table for each section in the result, in the order of the benchmark."""
    made = {
        "systems": _peers,
        "long_tail": _long_tail,
        "concurrency_sweep": _concurrency_sweep,
        "fill": _fill,
    }
    found = [make(result) for key, make in made.items() if key in result]
    single = _single_figures(result)
    return [*found, Table("single figures", ("figure", "value"), single)] if single else found


def _peers(result: Mapping[str, Any]) -> Table:
    rows = []
    for name, figures in result["systems"].items():
        ratio = result.get(f"vs_{name}")
        rows.append(
            [
                name,
                f"{result['tok_per_cpu_s'][name]:,.0f}",
                "" if ratio is None else f"{ratio:.2f}",
                f"{figures['cpu_s']:.3f}",
                f"{figures['wall_s']:.3f}",
                f"{figures['first_step_s']:.1f}",
                figures["version"],
            ]
        )
    columns = ("system", "tok / CPU s", "ours / theirs", "CPU s", "wall s", "first s", "version")
    return Table(f"rollouts: {describe_job()}; medians of {result['rounds']}", columns, rows)


def _long_tail(result: Mapping[str, Any]) -> Table:
    tail = result["long_tail"]
    plain, compacting = (result[f"continuous_over_{what}"] for what in ("static", "compacting_static"))
    title = (
        f"long tail: {tail['requests']} requests, {tail['max_num_seqs']} sequences at a time, log-normal "
        f"lengths {tail['shortest']} to {tail['longest']}, median {tail['median']:g}, sigma {tail['sigma']:g}, "
        f"mean {tail['mean']:.0f}"
    )
    rows = [
        [
            way.replace("_", " "),
            f"{figures['cpu_s']:.2f}",
            f"{figures['wall_s']:.2f}",
            f"{1e6 * figures['cpu_s'] / figures['tokens']:.1f}",
            *(f"{ratios[way]:.2f}" if way in ratios else "" for ratios in (plain, compacting)),
            f"{figures['over_bound']:.2f}",
            f"{figures['over_uniform_bound']:.2f}",
            "" if figures["row_steps_per_token"] is None else f"{figures['row_steps_per_token']:.2f}",
        ]
        for way, figures in tail["ways"].items()
    ]
    columns = (
        "way",
        "CPU s",
        "wall s",
        "CPU us / token",
        "times plain static",
        "times compacting",
        "over bound",
        "over uniform bound",
        "row-steps / token",
    )
    return Table(title, columns, rows)


def _concurrency_sweep(result: Mapping[str, Any]) -> Table:
    rows = []
    for point in result["concurrency_sweep"]:
        rates = [f"{point['tok_per_s']:,.0f}", f"{point['tok_per_cpu_s']:,.0f}"]
        times = [f"{point[what][p]:.0f}" for what in ("latency_ms", "first_token_ms") for p in ("p50", "p95", "p99")]
        rows.append([str(point["max_num_seqs"]), *rates, *times])
    percentiles = [f"{what} p{p} ms" for what in ("latency", "first token") for p in (50, 95, 99)]
    return Table(
        "concurrency: max_num_seqs requests at a time", ("max_num_seqs", "tok / s", "tok / CPU s", *percentiles), rows
    )


def _fill(result: Mapping[str, Any]) -> Table:
    rows = [
        [
            way,
            *(f"{figures[at]['tok_per_cpu_s']:,.0f}" for at in ("tenth", "nine_tenths")),
            f"{figures['ratio']:.3f}",
            " and ".join(f"{figures[at]['pages_used']:.0%}" for at in ("tenth", "nine_tenths")),
        ]
        for way, figures in result["fill"].items()
    ]
    columns = ("way", "tok / CPU s, tenth", "tok / CPU s, nine tenths", "ratio", "pages used on average")
    return Table("cache filled by pages of waiting requests (held) or by kept prefixes", columns, rows)


def _single_figures(result: Mapping[str, Any]) -> list[list[str]]:
    rows: list[list[str]] = []
    if "prefix" in result:
        prefix = result["prefix"]
        group = f"group of {prefix['group']} on {prefix['prompt_tokens']} tokens"
        rows += [
            [f"{group}: prefill work, by that without sharing", f"{result['prefix_share_prefill_ratio']:.4f}"],
            [f"{group}: full pages of the prompt, likewise", f"{prefix['full_pages_ratio']:.4f}"],
            [f"{group}: with the last page, which each sample writes", f"{prefix['pages_ratio']:.4f}"],
        ]
    if "inflight_pause_ms" in result:
        pause = result["inflight_pause_ms"]
        for name, prefix in (("pause for new weights", ""), ("of it placing of arrays", "placing_")):
            rows.append([f"{name}, p50 and p99", f"{pause[f'{prefix}p50']:.2f} and {pause[f'{prefix}p99']:.2f} ms"])
        rows.append(["turn after it by other turns", f"{pause['turn_after_over_turn']:.3f}"])
    if "host" in result:
        rows += [
            ["host time by dispatch", f"{result['host_ms_per_dispatch']:.2f} ms"],
            [
                "CPU time of the main thread by dispatch",
                f"{result['host']['main_thread_cpu_ms_per_dispatch']:.2f} ms",
            ],
            ["wall time by dispatch", f"{result['host']['wall_ms_per_dispatch']:.2f} ms"],
        ]
    if "warm_compiles" in result:
        rows.append(["programs compiled after the warm-up", str(result["warm_compiles"])])
    return rows
