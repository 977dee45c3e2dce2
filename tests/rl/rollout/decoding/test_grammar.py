"""Grammars in the engine: every completion has their form, other requests are as they would be without them."""

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from axlearn_like.tokenizers.phrases import PhraseTokenizer
from rl.rollout.decoding.grammar import Grammar, GrammarError, Grammars
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.rollout.speculation.speculator import Speculation
from tests.rl.rollout.small import assert_same, drain, make_engine, mixed, params, plain_logits
from tests.rl.tiny import PHRASES, make_prompt

TOKENIZER = PhraseTokenizer.Config(phrases=PHRASES).build()
LONG = 180
GRAMMARS = Grammars(TOKENIZER)
ENDS = StopConditions((TOKENIZER.eos,), max_new_tokens=LONG)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [True, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return make_engine(max_new_tokens=LONG)


def ask(grammar: Grammar, number: int, **fields: Any) -> Request:
    return Request(make_prompt(number, 5), **{"grammar": grammar, "seed": 3, "stop": ENDS, "samples": 2, **fields})


def texts(engine: RolloutEngine, requests: list[Request]) -> list[tuple[str, str]]:
    found = engine.generate(requests)
    return [(TOKENIZER.decode([t for t in r.tokens if t != TOKENIZER.eos]), r.finish_reason) for r in found]


@pytest.mark.slow
def test_completions_have_the_form_of_their_grammar(engine: RolloutEngine) -> None:
    sources: Any = [("json", SCHEMA), ("regex", "[a-c]{2,5}(x|yz)"), ("lark", 'start: "one" | "two"')]
    kinds = [GRAMMARS.read(*source) for source in sources]
    samplers = [None, Sampler.Config(temperature=0.0), Sampler.Config(temperature=2.0, top_p=0.9, top_k=30)]
    asked = [ask(kinds[n % 3], n, sampler=samplers[n // 3 % 3]) for n in range(18)]
    for index, (text, reason) in enumerate(texts(engine, asked)):
        assert reason == "stop", text
        if index // 2 % 3 == 0:
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert re.fullmatch("[a-c]{2,5}(x|yz)" if index // 2 % 3 == 1 else "one|two", text)


@pytest.mark.slow
def test_what_is_cut_is_the_beginning_of_the_form(engine: RolloutEngine) -> None:
    grammar = GRAMMARS.read("regex", "[0-9]{200}")
    for text, reason in texts(engine, [ask(grammar, n) for n in range(4)]):
        assert reason == "length" and re.fullmatch("[0-9]{180}", text)


@pytest.mark.full
def test_other_requests_and_the_same_alone_are_equal_to_the_bit(engine: RolloutEngine) -> None:
    grammar = GRAMMARS.read("json", SCHEMA)
    masked, plain = [ask(grammar, n) for n in range(3)], mixed(8)
    alone = [engine.generate([one]) for one in masked]
    expected = make_engine(max_new_tokens=LONG).generate(plain)
    numbers = [engine.submit(one) for pair in zip(masked, plain, strict=False) for one in pair]
    numbers += [engine.submit(one) for one in plain[3:]]
    finished = drain(engine)
    assert_same([r for number in numbers[:6:2] for r in finished[number].rollouts], [r for one in alone for r in one])
    others = [*numbers[1:6:2], *numbers[6:]]
    assert_same([r for number in others for r in finished[number].rollouts], expected)


@pytest.mark.full
def test_drafts_beside_a_grammar_change_nothing(engine: RolloutEngine) -> None:
    """Report #55313 of vLLM: with drafts a form was left, and white space followed without an end."""
    drafting = make_engine(max_new_tokens=LONG, speculation=Speculation.Config())
    grammar = GRAMMARS.read("json", SCHEMA)
    repeated = [Request(make_prompt(n, 5), stop=ENDS, sampler=Sampler.Config(temperature=0.0)) for n in range(3)]
    asked = [*[ask(grammar, n, sampler=Sampler.Config(temperature=0.0)) for n in range(3)], *repeated]
    drafting.generate(repeated)
    assert_same(drafting.generate(asked), engine.generate(asked))
    assert drafting.stats()["draft_dispatches"] > 0


@pytest.mark.slow
@pytest.mark.numerics
def test_logprobs_are_those_within_the_mask(engine: RolloutEngine) -> None:
    """The mask is the definition: words with which the text is the beginning of one that the expression matches."""
    asked = ask(GRAMMARS.read("regex", "(ab|c)+"), 1, samples=8)
    words = [TOKENIZER.token_bytes(token).decode(errors="replace") for token in range(TOKENIZER.vocab_size)]
    rollouts = engine.generate([asked])
    pairs = [(asked.prompt, rollout) for rollout in rollouts]
    for rollout, logits in zip(rollouts, plain_logits(params(), pairs), strict=True):
        text, expected = "", []
        for token, row in zip(rollout.tokens.tolist(), logits.astype(np.float64), strict=True):
            allowed = [bool(word) and bool(re.fullmatch("(ab|c)*a?", text + word)) for word in words]
            allowed[TOKENIZER.eos] = bool(re.fullmatch("(ab|c)+", text))
            row = np.where(allowed + [False] * (len(row) - len(words)), row / 0.8, -np.inf)
            expected.append(row[token] - row.max() - np.log(np.exp(row - row.max()).sum()))
            text += words[token]
        np.testing.assert_allclose(rollout.logprobs, expected, rtol=0, atol=3e-5)


@pytest.mark.slow
def test_stop_tokens_wait_for_the_end_and_a_least_length_gives_way(engine: RolloutEngine) -> None:
    """Neither breaks a form or a request, as in reports #42403 and #53665 of vLLM."""
    eager = tuple((token, 30.0) for token in (TOKENIZER.eos, 65))
    sampler = Sampler.Config(logit_bias=eager)
    stop = StopConditions((TOKENIZER.eos, 65), max_new_tokens=LONG)
    for text, reason in texts(
        engine, [ask(GRAMMARS.read("json", SCHEMA), n, sampler=sampler, stop=stop) for n in range(4)]
    ):
        jsonschema.validate(json.loads(text.removesuffix("A")), SCHEMA)
        assert reason == "stop"
    stop = StopConditions((TOKENIZER.eos,), max_new_tokens=LONG, min_new_tokens=20)
    short = GRAMMARS.read("regex", "[0-9]{3}")
    assert all(
        re.fullmatch("[0-9]{3}", text) for text, _ in texts(engine, [ask(short, n, stop=stop) for n in range(4)])
    )
    longer = GRAMMARS.read("regex", "[0-9]{3,}")
    assert all(len(text) >= 20 for text, _ in texts(engine, [ask(longer, n, stop=stop) for n in range(4)]))


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        ("json", '{"type": "objct"}'),
        ("json", "{"),
        ("regex", "(a"),
        ("lark", "start: b"),
        ("json", {"$ref": "#/nowhere"}),
    ],
)
def test_what_is_no_grammar_is_refused(kind: Any, grammar: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        GRAMMARS.read(kind, grammar)
    assert 0 < len(str(caught.value)) <= 300


@pytest.mark.slow
def test_a_grammar_that_cannot_go_on_fails_its_request_alone(engine: RolloutEngine) -> None:
    """Tokens that it does not allow stand for a limit of the library's, which is beyond a small model."""
    grammar = GRAMMARS.read("regex", "[0-9]{9}")
    wrong = ask(grammar, 1, samples=1)
    number, other = engine.submit(wrong), engine.submit(mixed(1)[0])
    engine.step()
    (sequence,) = engine.lifecycle.groups[number].sequences
    with pytest.raises(GrammarError):
        sequence.constraints.advance([65])
    finished = drain(engine)
    assert "the grammar cannot go on" in (finished[number].error or "")
    assert finished[other].error is None and isinstance(finished[other].rollouts[0].tokens, np.ndarray)
