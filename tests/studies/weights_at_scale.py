"""Tables of the parameter server on fleets of TPUs, computed by `weights_model`.

    python -m tests.studies.weights_at_scale              # the tables of docs/benchmarks/weights-at-scale.md
    python -m tests.studies.weights_at_scale --markdown   # rewrites them there

None of the figures is a measurement.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from tests.studies.broadcast_simulation import simulate
from tests.studies.weights_model import (
    CASES,
    DECODE,
    ENCODE,
    GB,
    SERVER,
    V5E,
    V5P,
    V6E,
    broadcast,
    direct,
    hop,
    pipelined,
    pull_bounds,
    push_bounds,
    readers_within,
)

DOC = Path(__file__).parents[2] / "docs" / "benchmarks" / "weights-at-scale.md"
BEGIN, END = "<!-- computed: python -m tests.studies.weights_at_scale --markdown -->\n", "<!-- end of computed -->\n"

STEP = 30.0  # seconds in which all workers must have a version: one training step, assumed
CALLS, CALLS_PER_SECOND = 4, 2000  # calls per worker host and version, and what one directory answers; assumed
CHUNK = 64e6  # bytes; of the pipelined chain, which is not implemented
HELD = 0.8  # fraction of a server host's memory for versions


def binding(bounds: dict[str, float]) -> str:
    """Return the largest bound, with its name."""
    name = max(bounds, key=lambda part: bounds[part])
    return f"{seconds(bounds[name])} ({name})"


def seconds(value: float) -> str:
    """Format seconds for a table."""
    return f"{value:.2g} s" if value < 1 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def hosts_table() -> str:
    """Return the table of machines."""
    rows = (
        (
            host.name,
            host.chips or "-",
            f"{host.hbm / GB:.0f}" if host.chips else "-",
            f"{host.pcie / GB:.0f}" if host.chips else "-",
            f"{host.nic / GB:.0f}",
            f"{host.memory / GB:.0f}",
            f"{host.memory_bandwidth / GB:.0f}",
            host.cores,
        )
        for host in (V5P, V6E, V5E, SERVER)
    )
    head = ["host", "chips", "HBM per chip, GB", "PCIe per chip, GB/s", "NIC, GB/s"]
    head += ["memory, GB", "memory, GB/s", "cores"]
    return table(head, rows)


def bytes_table() -> str:
    """Return the table of bytes per host."""
    head = ["case", "weights, GB", "trainer hosts", "GB each", "server hosts", "GB each"]
    head += ["hosts per worker", "GB each", "GB per chip", "two versions, % of HBM"]
    rows = (
        (
            case.name,
            f"{case.total / GB:.1f}",
            case.trainer_hosts,
            f"{case.pushed / GB:.2f}",
            case.server_hosts,
            f"{case.total / case.server_hosts / GB:.1f}",
            case.worker_hosts,
            f"{case.share / GB:.1f}",
            f"{case.share / case.host.chips / GB:.1f}",
            f"{200 * case.share / case.host.chips / case.host.hbm:.0f}",
        )
        for case in CASES
    )
    return table(head, rows)


def dense_table() -> str:
    """Return all bounds of an uncompressed push, and of an uncompressed pull by one worker."""
    parts = (("push", push_bounds), ("pull", pull_bounds))
    tables = []
    for title, bounds in parts:
        names = [name for name in bounds(CASES[0]) if name not in ("encode", "decode")]
        rows = ((case.name, *(seconds(bounds(case)[name]) for name in names), binding(bounds(case))) for case in CASES)
        tables.append(table([title, *names, "at least"], rows))
    return "\n".join(tables)


def delta_table() -> str:
    """Return the binding bound of a pull by delta, for two compression ratios."""
    head = ["case", "pull, 10x", "pull, 30x", "pull, 30x, with a codec that costs nothing"]
    rows = (
        (
            case.name,
            *(binding(pull_bounds(case, ratio, codec=True)) for ratio in (10, 30)),
            binding(pull_bounds(case, 30)),
        )
        for case in CASES
    )
    return table(head, rows)


def broadcast_table() -> str:
    """Return the simulated broadcasts, in transfers; with deaths, the worst of five seeds."""
    head = ["readers of a shard set", "direct", "fanout 1", "fanout 2", "fanout 1, stream 1/2", "fanout 2, stream 1/2"]
    head += ["fanout 1, deaths", "server copies with deaths", "chain of 512 chunks"]
    rows = []
    for readers in (8, 64, 128, 1000):
        killed = [simulate(readers, fanout=1, death_rate=0.02, seed=seed) for seed in range(5)]
        outcomes = [simulate(readers, fanout=fanout) for fanout in (None, 1, 2)]
        outcomes += [simulate(readers, fanout=fanout, stream=0.5) for fanout in (1, 2)]
        rows.append(
            (
                readers,
                *(f"{outcome.finished:.0f}" for outcome in outcomes),
                f"{max(outcome.finished for outcome in killed):.1f}",
                f"{max(outcome.server_copies for outcome in killed):.1f}",
                f"{pipelined(readers, 512):.1f}",
            )
        )
    return table(head, rows)


def fanout_table() -> str:
    """Return the seconds until the last worker has a version in host memory. Deltas are decoded before forwarding."""
    head = ["case", "workers", "direct", "fanout 1", "fanout 2", "fanout 1, n seeds", "fanout 1, delta 10x"]
    head += ["pipelined, not implemented"]
    rows = []
    for case in CASES:
        transfer = case.share / case.host.nic
        one, two = (broadcast(case, fanout).finished * transfer for fanout in (1, 2))
        chain = pipelined(case.workers, math.ceil(case.share / CHUNK)) * transfer
        first = case.total / (case.server_hosts * SERVER.nic)
        seeds = max(1, round(case.server_links))
        seeded = f"{seconds(broadcast(case, 1, seeds).finished * transfer)} ({seeds})"
        delta = broadcast(case, 1).finished * hop(case, 10)
        times = [seconds(time) for time in (direct(case), one, two, delta, max(chain, first))]
        rows.append((case.name, case.workers, *times[:3], seeded, *times[3:]))
    return table(head, rows)


def memory_table() -> str:
    """Return how many versions fit into host memory."""
    head = [
        "case",
        "GB per version and server host",
        "versions that fit",
        "server hosts for 4 versions",
        "two versions on a worker host",
    ]
    rows = (
        (
            case.name,
            f"{case.total / case.server_hosts / GB:.1f}",
            math.floor(HELD * SERVER.memory * case.server_hosts / case.total),
            math.ceil(4 * case.total / (HELD * SERVER.memory)),
            f"{2 * case.share / GB:.0f} of {case.host.memory / GB:.0f} GB",
        )
        for case in CASES
    )
    return table(head, rows)


def limits_table() -> str:
    """Return where each way of scaling stops to help, if all workers must have a version within `STEP`."""
    head = ["case", "server hosts that a push can saturate", "workers, direct", "workers, fanout 1"]
    head += ["workers, fanout 1, delta 10x", "workers that one directory can serve"]
    rows = (
        (
            case.name,
            math.ceil(case.trainer_hosts * case.host.nic / SERVER.nic),
            math.floor(STEP * case.server_hosts * SERVER.nic / case.total),
            readers_within(STEP, case.share / case.host.nic, case.total / (case.server_hosts * SERVER.nic)),
            readers_within(STEP, hop(case, 10), case.total / 10 / (case.server_hosts * SERVER.nic)),
            f"{CALLS_PER_SECOND * int(STEP) // CALLS // case.worker_hosts:,}",
        )
        for case in CASES
    )
    return table(head, rows)


def tables() -> str:
    """Return all tables of the page, with their headings."""
    parts = (
        ("Hosts", "Given or assumed; see the sources below.", hosts_table()),
        ("Bytes", "Computed, not measured.", bytes_table()),
        ("Dense push and pull", "Computed lower bounds, not measured.", dense_table()),
        (
            "Pull by delta",
            f"Computed lower bounds, not measured; {ENCODE:g} and {DECODE:g} CPU seconds to encode and decode a GB, "
            "on all cores of a host.",
            delta_table(),
        ),
        (
            "Peer-to-peer broadcast, in transfers",
            "Simulated with the production scheduler, not measured.",
            broadcast_table(),
        ),
        ("All workers, dense", "Simulated rounds times computed seconds of a transfer, not measured.", fanout_table()),
        ("Memory", f"Computed, not measured; versions may take {HELD:.0%} of a server host.", memory_table()),
        (
            "Limits of scaling",
            f"Computed, not measured: all workers within {STEP:g} s; {CALLS} calls to the directory per worker host "
            f"and version, {CALLS_PER_SECOND:,} answered per second (assumed).",
            limits_table(),
        ),
    )
    return "\n".join(f"### {title}\n\n{note}\n\n{text}" for title, note, text in parts)


def with_tables(text: str) -> str:
    """Return the page with the tables between its markers regenerated."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.split(END)[1]


@click.command()
@click.option("--markdown", is_flag=True, help="Write the tables into docs/benchmarks/weights-at-scale.md.")
def main(markdown: bool) -> None:
    """Compute bounds of the parameter server on fleets of TPUs."""
    if markdown:
        DOC.write_text(with_tables(DOC.read_text()))
    else:
        print(tables())


if __name__ == "__main__":
    main()
