"""Text of plans of graph decoding: one line a node, with the nodes whose answers it needs.

1 (): 3+4
2 (): 9-5
3 (1, 2): #1+#2
"""

import dataclasses
import re

from mesh.errors import UserError

_LINE = re.compile(r"\s*(\d{1,6}) ?\(([\d, ]*)\): ?(.*\S)\s*")


class PlanError(UserError):
    """A plan that cannot be carried out."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanNode:
    """One line of a plan."""

    number: int  # name in the plan
    parents: tuple[int, ...]  # numbers of the nodes whose answers it needs
    text: str  # the rest of the line
    written: int  # tokens of the completion up to the end of its line


class GraphPlan:
    """The nodes of a plan, by number, in the order of their lines."""

    def __init__(self, max_nodes: int):
        self._max_nodes = max_nodes
        self.nodes: dict[int, PlanNode] = {}

    def add(self, line: str, written: int) -> None:
        """Add a line (PlanError: it is no line of a plan, its number is taken, or there are too many)."""
        if (found := _LINE.fullmatch(line)) is None:
            raise PlanError(f"plan line {line.strip()[:80]!r}; expected NUMBER (PARENT, PARENT): TEXT")
        number, parents = int(found[1]), tuple(dict.fromkeys(map(int, re.findall(r"\d+", found[2]))))
        if number in self.nodes:
            raise PlanError(f"node {number} stands in the plan twice")
        if len(self.nodes) == self._max_nodes:
            raise PlanError(f"the plan has more than {self._max_nodes} nodes (max_nodes)")
        self.nodes[number] = PlanNode(number, parents, found[3], written)

    def ready(self, begun: set[int]) -> list[PlanNode]:
        """Return the nodes, in an order in which they can begin, whose parents have begun or come before them."""
        found, known = list[PlanNode](), set(begun)
        while new := [one for one in self.nodes.values() if one.number not in known and known.issuperset(one.parents)]:
            found += new[:1]
            known.add(new[0].number)
        return found

    def check(self) -> None:
        """Refuse a plan that is complete, and has nodes that can never begin (PlanError)."""
        for node in self.nodes.values():
            if missing := [parent for parent in node.parents if parent not in self.nodes]:
                raise PlanError(f"node {node.number} needs node {missing[0]}, which the plan does not have")
        able = {node.number for node in self.ready(set())}
        if stuck := [number for number in self.nodes if number not in able]:
            raise PlanError(f"nodes {', '.join(map(str, stuck))} need each other: the plan has a cycle")
        if not self.nodes:
            raise PlanError("the plan has no nodes")
