"""The fixed tree over the parts of a batch by which gradients are summed, in whatever process they were computed.

A node is a range of parts [first, last); its halves are its children. A member computes consecutive parts and sends the
sums of the largest nodes among them. So additions and their order are the same for every number of members, and with
them every bit.
"""

from collections.abc import Callable, Mapping
from typing import Any

Node = tuple[int, int]


def share(parts: int, member: int, members: int) -> range:
    """Return the parts that a member computes: consecutive, and one more or less than the others have."""
    return range(member * parts // members, (member + 1) * parts // members)


def nodes(parts: int, mine: range) -> list[Node]:
    """Return the fewest nodes that cover some consecutive parts, in their order.

    >>> from axlearn_like.elastic.parts import nodes
    >>> nodes(8, range(3, 8))
    [(3, 4), (4, 8)]
    """

    def cover(first: int, last: int) -> list[Node]:
        if mine.start >= last or mine.stop <= first:
            return []
        if mine.start <= first and last <= mine.stop:
            return [(first, last)]
        middle = (first + last + 1) // 2
        return cover(first, middle) + cover(middle, last)

    return cover(0, parts)


def fold[T](node: Node, have: Mapping[Node, T] | Callable[[Node], T | None], add: Callable[[T, T], T]) -> T:
    """Return the sum of a node from those of nodes below it.

    Args:
        node: the node.
        have: sums that are there, node -> sum, or a function that returns None where none is.
        add: adds the sum of a first half and that of a second.

    Raises:
        KeyError: a part is in no sum.
    """
    get: Any = have if callable(have) else have.get
    found = get(node)
    if found is not None:
        return found
    first, last = node
    if last - first == 1:
        raise KeyError(f"part {first} is missing")
    middle = (first + last + 1) // 2
    return add(fold((first, middle), have, add), fold((middle, last), have, add))
