"""Rollouts of graph decoding: the plan is the sample, and the answers of its nodes are rollouts beside it.

A node's prompt begins with that of the problem, so its rollout is one of the same group, whose first tokens were given.
Nodes of several samples that begin alike are trained on once where they do (`trainer.packing.tree`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError
from rl.environments.task import environments_of
from rl.protocol.experiment import ExperimentFields
from rl.protocol.messages import Episode, Prompt, Rollout, TreeNode, Turn
from rl.rollout.agent_loops.commands import child_sample
from rl.rollout.agent_loops.graph.decoding import GraphDecoding, GraphRecord
from rl.rollout.agent_loops.graph.plan import PlanNode
from rl.rollout.request import Request, RequestOutput
from rl.verification.rewards import number


class GraphRollouts(Configurable):
    """Requests whose samples are plans with nodes, and the records of how they went."""

    class Config(ConfigBase["GraphRollouts"]):
        """Fields of the rewards of plans and nodes."""

        decoding: GraphDecoding.Config = GraphDecoding.Config()
        # Reward that each token of the critical path costs a sample; evaluations leave it out. A plan that cannot be
        # carried out costs what `max_new_tokens` do: there is nothing to gain by a short one
        path_cost: float = 0.0
        # Reward of a node: a function of its text, the answers of its parents by number, and its own answer. None: that
        # of its sample
        node_reward: Callable[[str, Mapping[int, str], str], float] | None = None

        def check_fields(self) -> None:
            """Refuse a cost that is a reward."""
            self.require_least(0, "path_cost")

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse other loops, and an objective or rows that do not know of nodes."""
            others = (experiment.branching, experiment.interruption, experiment.demonstrations)
            free = not environments_of(experiment.tasks) and all(one is None for one in others)
            experiment.require("graph", free, "None with environments, branching, interruption or demonstrations")
            trainer, advantage = experiment.trainer, experiment.objective.advantage
            trainer.require("packing", trainer.packing is not None, "a packing for the nodes of a graph")
            whole = trainer.updates is None or trainer.updates.minibatches == 1
            trainer.require("updates", whole, "None, or one mini-batch, with a graph")
            built = advantage.build()
            fits = not (built.needs_values or built.learns_values or built.needs_lengths)
            fits = fits and (built.by_node or not built.by_turn)
            experiment.objective.require("advantage", fits, "one of rewards alone, or NodeAdvantage, with a graph")

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer, max_new_tokens: int):
        """`max_new_tokens`: tokens of a rollout, behind the prompt of its problem, at most."""
        self._cfg, self._longest = cfg, max_new_tokens
        self._decoding: GraphDecoding = cfg.decoding.build(tokenizer=tokenizer, room=max_new_tokens)

    def request(self, prompt: Prompt, samples: int, seed: int, partial: Iterable[Rollout] = ()) -> Request:
        """Return the request of these samples; `partial`: none, for nodes of a plan that has ended are gone."""
        return Request(prompt, samples, seed, partial=tuple(partial), agent_loop=self._decoding)

    def trained(self, output: RequestOutput) -> tuple[Rollout, ...]:
        """Return the samples of an output with their records, followed by the rollouts of their nodes."""
        nodes = [node for rollout in output.rollouts for node in self._nodes(rollout, output)]
        return (*self.recorded(output.rollouts, costs=True), *nodes)

    def recorded(self, rollouts: Iterable[Rollout], *, costs: bool = False) -> tuple[Rollout, ...]:
        """Return samples with the records of their plans, which are forgotten; `costs`: less the cost of the path."""
        records = self._decoding.records
        return tuple(
            one
            if (record := records.pop((one.prompt_id, one.sample_id), None)) is None
            else dataclasses.replace(one, episode=self._episode(one, record, self._cfg.path_cost * costs))
            for one in rollouts
        )

    def _episode(self, rollout: Rollout, record: GraphRecord, cost: float) -> Episode:
        drawn = int(rollout.action_mask.sum())
        path = record.critical_path if record.answers else self._longest
        figures = {
            "critical_path": record.critical_path or drawn,
            "nodes": len(record.answers),
            "plan_errors": bool(record.error),
        }
        turns = (Turn(len(rollout.tokens), -cost * path),) if len(rollout.tokens) else ()
        named = tuple((name, float(value)) for name, value in sorted(figures.items()))
        return Episode(turns, self._decoding.shown(record), figures=named)

    def _nodes(self, rollout: Rollout, output: RequestOutput) -> list[Rollout]:
        record = self._decoding.records.get((rollout.prompt_id, rollout.sample_id))
        if record is None or record.error:
            return []
        places = {child_sample(rollout.sample_id, place): one for place, one in enumerate(record.nodes.values())}
        found = []
        for prompt, drawn in output.spawned:
            if (node := places.get(drawn.sample_id)) is None:
                continue
            place = TreeNode(rollout.sample_id, node.number, self._reward(node, record.answers))
            found.append(_behind(drawn, prompt[record.prompt :], place))
        return found

    def _reward(self, node: PlanNode, answers: Mapping[int, str]) -> float | None:
        if self._cfg.node_reward is None:
            return None
        above = {parent: answers[parent] for parent in node.parents}
        try:
            return number(self._cfg.node_reward(node.text, above, answers[node.number]), "node")
        except Exception as error:
            raise UserError(f"graph.node_reward: node {node.number} ({node.text[:80]!r}): {error!r}") from error


def _behind(rollout: Rollout, given: np.ndarray, node: TreeNode) -> Rollout:
    """Return a rollout of a longer prompt as one of a prompt that lacks its last tokens, which were given."""
    count = len(given)
    before: dict[str, np.ndarray] = {
        "tokens": given,
        "logprobs": np.zeros(count, np.float32),
        "versions": np.full(count, rollout.versions[:1] if len(rollout.versions) else 0, np.int32),
        "action_mask": np.zeros(count, bool),
    }
    if (packed := rollout.candidate_tokens) is not None:
        before["candidate_tokens"] = np.full((count, packed.shape[1]), np.iinfo(packed.dtype).max, packed.dtype)
    whole: dict[str, Any] = {
        name: np.concatenate([more.astype(getattr(rollout, name).dtype), getattr(rollout, name)])
        for name, more in before.items()
    }
    return dataclasses.replace(rollout, node=node, **whole)
