"""Fleets of chips of several kinds: which of them train, and which draw."""

from collections.abc import Callable, Iterator, Mapping

from mesh import UserError
from mesh.topology import Topology, slices_within

_FORM = "expected workers=FIRST..LAST, such as workers=16..128, or chips such as v5e=16,v6e=8"


def read_chips(text: str) -> dict[str, int]:
    """Return numbers of chips by kind, of a text such as `v5e=16,v6e=8` (UserError: of another form)."""
    found = dict[str, int]()
    for part in text.split(","):
        kind, _, number = (word.strip() for word in part.partition("="))
        if not kind or not number.isdecimal() or not int(number) or kind in found:
            raise UserError(f"--search {text!r}: {_FORM}")
        found[kind] = int(number)
        slices_within(kind, 0)  # refuses a kind that there is not
    return found


def assignments(chips: Mapping[str, int]) -> Iterator[list[str]]:
    """Return fleets of these chips, a list for each pair of a kind that trains and one that draws.

    The trainer has the largest slice of its kind; where that kind draws too, the largest one of half of its chips. The
    workers have the rest of theirs: the fleets of a list differ by the chips of a worker, the fewest first.
    """
    for trains, count in chips.items():
        for draws in chips:
            trainer = slices_within(trains, count // 2 if draws == trains else count)
            if trainer:
                left = chips[draws] - (_chips(trainer[-1]) if draws == trains else 0)
                workers = [(left // _chips(one), one) for one in slices_within(draws, left)]
                yield [f"trainer={trainer[-1]},workers={number}x{one}" for number, one in workers]


def fleets_that_fit[C](
    chips: Mapping[str, int], load: Callable[[str], C], check: Callable[[C], None] = lambda placed: None
) -> tuple[dict[str, C], dict[str, str]]:
    """Return for each pair of kinds the first fleet on which the experiment fits, and why there is none, by fleet.

    `load`: places the experiment on a fleet; this, or `check`, raises UserError where it does not fit.

    Raises:
        UserError: it fits on none of them.
    """
    found, refused = dict[str, C](), dict[str, str]()
    for fleets in assignments(chips):
        for text in fleets:
            try:
                check(placed := load(text))
                found[text] = placed
                break
            except UserError as error:
                why = str(error)
            if text == fleets[-1]:
                refused[text] = why
    if not found:
        listed = "".join(f"\n  {text}: {why}" for text, why in refused.items())
        raise UserError(f"--search: the experiment fits on no fleet of these chips{listed or '; they are too few'}")
    return found, refused


def _chips(topology: Topology) -> int:
    return topology.devices // topology.generation.devices
