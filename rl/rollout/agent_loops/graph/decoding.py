"""Skeleton graph decoding (SGD; Plato, arXiv 2402.12280) as an agent loop.

The completion draws a plan line by line. Each node becomes a completion of its own, which begins when its line is
complete, waits for the answers of its parents, is given them and draws its own; the engine's batch does the rest. All
nodes share the prompt of the problem as their prefix. At the end the completion is given the answers.

Other orders of the same nodes are there to be compared: `planned` waits for the whole plan, `sequential` draws one
answer after the other, and `flat` shows no node its parents' answers (Skeleton-of-Thought, arXiv 2307.15337).
"""

import dataclasses
from collections.abc import Generator
from typing import Any, Literal

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.tokenizers.inside import encode_inside
from axlearn_like.tokenizers.protocol import Tokenizer, answer_text
from mesh.errors import UserError
from rl.protocol.messages import FinishReason, Rollout
from rl.rollout.agent_loops.commands import AgentLoop, Command, Completion, Generate, Join, Observe, Spawn
from rl.rollout.agent_loops.graph.plan import GraphPlan, PlanError, PlanNode

Order = Literal["pipelined", "planned", "sequential", "flat"]


@dataclasses.dataclass(slots=True)
class GraphRecord:
    """Record of one sample."""

    answers: dict[int, str] = dataclasses.field(default_factory=dict[int, str])  # answers by number of the node
    # Nodes by number, in the order of their starts
    nodes: dict[int, PlanNode] = dataclasses.field(default_factory=dict[int, PlanNode])
    prompt: int = 0  # tokens of the problem's prompt, with which those of the nodes begin
    drawn: dict[int, int] = dataclasses.field(default_factory=dict[int, int])  # tokens drawn for each node
    critical_path: int = 0  # tokens drawn one after the other, plan and answers, where all rows are free
    error: str = ""  # why it has no answers; "" for nothing


class GraphDecoding(Configurable):
    """The agent loop; `records` has each sample's record once it is over, by (prompt id, sample id)."""

    class Config(ConfigBase["GraphDecoding"]):
        """Fields of plans and nodes."""

        order: Order = "pipelined"  # see the module
        max_nodes: int = 32  # nodes of a plan; a longer one fails its sample
        max_line_tokens: int = 64  # tokens of a plan line
        max_answer_tokens: int = 64  # tokens of a node's answer, which ends with a line as well
        # Text behind the problem's prompt from which a node answers; {number} and {text} are its line's
        node: str = "\n{number}: {text}\n"
        # Text of a parent's answer, with its {number} and {answer}
        parent: str = "#{number} {answer}\n"
        asks: str = "= "  # text before a node's answer
        # The answer that the completion is given: that of the highest number, or all of them
        ends_with: Literal["last", "all"] = "last"

        def check_fields(self) -> None:
            """Refuse sizes that no plan has."""
            self.require_least(1, "max_nodes", "max_line_tokens", "max_answer_tokens")
            self.require("max_nodes", self.max_nodes <= 64, "at most 64, the children of a completion")

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer, room: int | None = None):
        """`room`: tokens of a node behind the problem's prompt, at most; None: the engine's limits hold."""
        self._cfg, self._tokenizer, self._room = cfg, tokenizer, room
        self.records: dict[tuple[int, int], GraphRecord] = {}

    def __call__(self, completion: Completion) -> Generator[Command, Any, FinishReason | None]:
        """Draw the plan and its nodes. A plan that cannot be carried out ends the sample without an answer."""
        record, begun = GraphRecord(prompt=len(completion.prompt)), dict[int, Completion]()
        try:
            plan = yield from self._plan(completion, begun)
            yield from self._begin(completion, plan, begun)
            rollouts = dict(zip(begun, (yield Join(tuple(begun.values()))), strict=True))
            self._record(plan, rollouts, len(completion.output_tokens), record)
            given = self._encode(f"{self.shown(record)}\n")
            if (yield Observe(given)) < len(given):
                raise PlanError("the completion has no room for the answers of its nodes")
        except UserError as error:
            record.error = str(error)
        self.records[completion.rollout().prompt_id, completion.sample] = record
        return "stop"

    def shown(self, record: GraphRecord) -> str:
        """Return the answer that a completion is given; "" if it has none."""
        if self._cfg.ends_with == "last":
            return record.answers.get(max(record.answers, default=0), "")
        return "\n".join(record.answers[number] for number in record.answers)

    def _plan(self, completion: Completion, begun: dict[int, Completion]) -> Generator[Command, Any, GraphPlan]:
        plan, limit = GraphPlan(self._cfg.max_nodes), self._cfg.max_line_tokens
        while True:
            first = len(completion.output_tokens)
            reason = yield Generate(limit, ("\n",))
            line = answer_text(self._tokenizer, completion.output_tokens[first:].tolist())
            if reason != "stop":
                raise PlanError(f"plan line {line[:80]!r} does not end (max_line_tokens={limit}, or no room is left)")
            if line.strip():
                plan.add(line, len(completion.output_tokens))
            if not line.strip() or not line.endswith("\n"):
                plan.check()
                return plan
            if self._cfg.order == "pipelined":
                yield from self._begin(completion, plan, begun)

    def _begin(
        self, completion: Completion, plan: GraphPlan, begun: dict[int, Completion]
    ) -> Generator[Command, Any, None]:
        for node in plan.ready(set(begun)):
            text = self._encode(self._cfg.node.format(number=node.number, text=node.text))
            if self._room is not None and len(text) >= self._room:
                raise PlanError(f"node {node.number} has {len(text)} tokens; expected less than {self._room}")
            limit = None if self._room is None else self._room - len(text)
            parents = () if self._cfg.order == "flat" else tuple(begun[number] for number in node.parents)
            begun[node.number] = yield Spawn([*completion.prompt, *text], self._node(node, parents), limit)
            if self._cfg.order == "sequential":
                yield Join((begun[node.number],))

    def _node(self, node: PlanNode, parents: tuple[Completion, ...]) -> AgentLoop:
        def play(completion: Completion) -> Generator[Command, Any, None]:
            rollouts = (yield Join(parents)) if parents else []
            told = [
                self._cfg.parent.format(number=number, answer=self._answer(rollout))
                for number, rollout in zip(node.parents, rollouts, strict=bool(parents))
            ]
            given = self._encode("".join(told) + self._cfg.asks)
            if (yield Observe(given)) < len(given):
                raise PlanError(f"node {node.number} has no room for the answers of its parents")
            yield Generate(self._cfg.max_answer_tokens, ("\n",))

        return play

    def _record(self, plan: GraphPlan, rollouts: dict[int, Rollout], planned: int, record: GraphRecord) -> None:
        ends, before = dict[int, int](), planned
        for number, rollout in rollouts.items():
            node, order = plan.nodes[number], self._cfg.order
            record.nodes[number] = node
            record.answers[number], record.drawn[number] = self._answer(rollout), int(rollout.action_mask.sum())
            start = before if order == "sequential" else node.written if order == "pipelined" else planned
            waits = () if order == "flat" else node.parents
            ends[number] = max([start, *(ends[parent] for parent in waits)]) + record.drawn[number]
            before = ends[number]
        record.critical_path = max(planned, *ends.values())

    def _answer(self, rollout: Rollout) -> str:
        return answer_text(self._tokenizer, rollout.tokens[rollout.action_mask].tolist()).strip()

    def _encode(self, text: str) -> list[int]:
        return list(encode_inside(self._tokenizer, text))
