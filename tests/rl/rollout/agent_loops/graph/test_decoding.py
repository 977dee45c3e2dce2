"""Graph decoding on the engine: the same answers in every order, what nodes see, the critical path, and bad plans."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.tokenizers.protocol import completion_text
from rl.protocol.messages import Prompt
from rl.rollout.agent_loops.commands import Command, Generate, Observe
from rl.rollout.agent_loops.graph.decoding import GraphDecoding, GraphRecord, Order
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, RequestOutput, StopConditions
from rl.rollout.sampling import Sampler
from tests.rl.tiny import tiny_params, tiny_policy

TOKENIZER = ByteTokenizer.Config().build()
POLICY = tiny_policy(TOKENIZER.vocab_size)
QUESTION = "What is it?\n"
PLAN = "1 (): left\n2 (): right\n4 (2): more\n3 (1, 4): both\n\n"
DIGITS = tuple((ord(digit), 30.0) for digit in "0123456789") + ((ord("\n"), 28.5),)


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    """A policy of random weights, which draws nothing but digits and, now and then, a line end."""
    cfg = RolloutEngine.Config(
        model=POLICY,
        stop_tokens=(TOKENIZER.eos,),
        max_prompt_tokens=64,
        max_new_tokens=96,
        max_num_seqs=8,
        page_size=8,
        steps_per_dispatch=4,
        prefill_tokens=64,
        sampler=Sampler.Config(logit_bias=DIGITS),
    )
    built = cfg.build(decode=lambda tokens: completion_text(TOKENIZER, tokens))
    built.set_weights(tiny_params(POLICY), 0)
    return built


class Given(Generator[Command, Any, Any]):
    """A loop of which the plan is given in place of drawn: `Generate`s of the completion itself become `Observe`s."""

    def __init__(self, loop: Generator[Command, Any, Any], plan: str):
        self._loop, self._lines = loop, plan.splitlines(keepends=True)
        self._observed = False

    def send(self, answer: Any) -> Command:
        command = self._loop.send("stop" if self._observed else answer)
        self._observed = isinstance(command, Generate)
        return Observe(TOKENIZER.encode(self._lines.pop(0))) if self._observed else command

    def throw(self, *error: Any) -> Command:
        self._observed = False
        return self._loop.throw(*error)


def play(
    engine: RolloutEngine, order: Order = "pipelined", plan: str = PLAN, **fields: Any
) -> tuple[RequestOutput, GraphRecord]:
    decoding = GraphDecoding.Config(order=order, **{"max_answer_tokens": 12, **fields}).build(tokenizer=TOKENIZER)
    prompt = Prompt(5, "any", np.asarray(TOKENIZER.encode(QUESTION), np.int32))
    number = engine.submit(Request(prompt, agent_loop=lambda completion: Given(decoding(completion), plan)))
    while engine.busy:
        for output in engine.step():
            if output.number == number:
                return output, decoding.records[5, 0]
    raise AssertionError("expected an output")


def text(tokens: Any) -> str:
    return completion_text(TOKENIZER, tokens.tolist())


@pytest.mark.slow
def test_all_orders_draw_the_same_answers_and_differ_in_their_critical_path(engine: RolloutEngine) -> None:
    outputs = {order: play(engine, order) for order in ("pipelined", "planned", "sequential")}
    (output, record), *others = outputs.values()
    assert not record.error and list(record.answers) == [1, 2, 4, 3] and len(set(record.answers.values())) > 2
    for other, same in others:
        assert same.answers == record.answers and same.drawn == record.drawn
        for (one, first), (two, second) in zip(output.spawned, other.spawned, strict=True):
            assert one.tolist() == two.tolist() and first.tokens.tolist() == second.tokens.tolist()
    drawn, planned = record.drawn, len(PLAN)
    paths = {order: found.critical_path for order, (_, found) in outputs.items()}
    assert paths["sequential"] == planned + sum(drawn.values())
    assert paths["planned"] == planned + max(drawn[1], drawn[2] + drawn[4]) + drawn[3]
    ends = [len("1 (): left\n"), len("1 (): left\n2 (): right\n"), len(PLAN) - len("3 (1, 4): both\n\n"), planned - 1]
    second = max(ends[2], ends[1] + drawn[2]) + drawn[4]
    assert paths["pipelined"] == max(planned, max(ends[3], ends[0] + drawn[1], second) + drawn[3])
    assert paths["pipelined"] < paths["planned"] < paths["sequential"]


@pytest.mark.slow
def test_a_node_sees_its_line_and_the_answers_of_its_parents(engine: RolloutEngine) -> None:
    output, record = play(engine)
    seen = [(text(prompt), text(rollout.tokens[~rollout.action_mask])) for prompt, rollout in output.spawned]
    assert [prompt for prompt, _ in seen] == [
        f"{QUESTION}\n{line}\n" for line in ("1: left", "2: right", "4: more", "3: both")
    ]
    answers = record.answers
    assert [given for _, given in seen] == ["= ", "= ", f"#2 {answers[2]}\n= ", f"#1 {answers[1]}\n#4 {answers[4]}\n= "]
    (root,) = output.rollouts
    assert text(root.tokens) == f"{PLAN}{answers[4]}\n" and root.finish_reason == "stop"
    both, whole = play(engine, ends_with="all", max_answer_tokens=6)
    assert text(both.rollouts[0].tokens) == PLAN + "".join(f"{whole.answers[n]}\n" for n in (1, 2, 4, 3))
    _, failed = play(engine, ends_with="all", max_answer_tokens=30)
    assert "no room for the answers of its nodes" in failed.error
    flat, _ = play(engine, "flat")
    assert {text(rollout.tokens[~rollout.action_mask]) for _, rollout in flat.spawned} == {"= "}


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("1 (2): a\n2 (1): b\n\n", "nodes 1, 2 need each other"),
        ("1 (): a\n2 (7): b\n\n", "node 2 needs node 7"),
        ("".join(f"{n} (): x\n" for n in range(9)) + "\n", "more than 8 nodes"),
        ("do it\n", "expected NUMBER"),
        ("\n", "no nodes"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_fails_its_sample_alone(engine: RolloutEngine, plan: str, why: str) -> None:
    output, record = play(engine, plan=plan, max_nodes=8)
    assert output.error is None and why in record.error and output.rollouts[0].finish_reason == "stop"


@pytest.mark.slow
def test_what_a_node_has_no_room_for_is_said(engine: RolloutEngine) -> None:
    lines = "".join(f"{n} (): x\n" for n in range(1, 7))
    output, record = play(engine, plan=f"{lines}9 (1, 2, 3, 4, 5, 6): y\n\n", max_answer_tokens=60)
    assert "no room" in record.error or len(record.answers) == 7
    assert output.error is None
    long, failed = play(engine, plan=f"1 (): {'x' * 60}\n\n")
    assert "max_prompt_tokens" in failed.error and long.error is None


@pytest.mark.slow
def test_a_policy_that_writes_no_plan_is_counted_as_such(engine: RolloutEngine) -> None:
    decoding = GraphDecoding.Config(max_line_tokens=8).build(tokenizer=TOKENIZER)
    prompt = Prompt(6, "any", np.asarray(TOKENIZER.encode(QUESTION), np.int32))
    rollouts = engine.generate([Request(prompt, 3, agent_loop=decoding, stop=StopConditions((TOKENIZER.eos,)))])
    assert len(rollouts) == 3 and all(decoding.records[6, sample].error for sample in range(3))
