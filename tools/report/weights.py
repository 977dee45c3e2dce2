"""Seconds of each stage of a weight transfer from the trainer to the workers, as a table of the page."""

from __future__ import annotations

from html import escape

from tools.report.load import Run, mapping, number

KINDS = ("median", "max")
WHAT = {
    "push": "from an update's end until its version could be pulled",
    "transfer": "of a version to a worker's devices, most of it beside drawing",
    "wait": "of a worker for a version that was not there yet",
    "pause": "in which a worker did not draw because of new weights",
    "age": "of a version, since its publication, when a worker began to use it",
}


def section(run: Run) -> str:
    """Return medians, maxima and bytes; nothing if the run has no report yet."""
    figures = mapping(run.report.get("weights"))
    rows = "".join(
        f"<tr><td>{name}</td><td>{escape(what)}</td>"
        + "".join(f'<td class="num">{number(mapping(figures[name]).get(kind)) or 0.0:.3f}</td>' for kind in KINDS)
        + "</tr>"
        for name, what in WHAT.items()
        if name in figures
    )
    if not rows:
        return ""
    pulled, travelled = (number(figures.get(name)) or 0.0 for name in ("pulled_bytes", "network_bytes"))
    heads = "".join(f'<th class="num">{kind}</th>' for kind in KINDS)
    return (
        f'<div class="card scroll"><h3>Weights on their way</h3><table><thead><tr><th>seconds</th><th></th>{heads}</tr>'
        f"</thead><tbody>{rows}</tbody></table><p>{pulled / 1e6:,.1f} MB pulled, of which {travelled / 1e6:,.1f} MB "
        "travelled over sockets; the rest was mapped or encoded away.</p></div>"
    )
