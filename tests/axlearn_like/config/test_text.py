"""Configs as text: the golden form, the way back, the differences."""

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.config import REQUIRED, ConfigBase, ConfigError, config_for, diff, from_text, to_text
from tests.axlearn_like.config.zoo import Block, Experts, Ffn, Model, Norm, Tail, chain, relu, schedule

ZOO = "tests.axlearn_like.config.zoo"

GOLDEN = f"""\
{ZOO}:Block
dim: REQUIRED
ffn: {ZOO}:Experts
ffn.activation: {ZOO}:relu
ffn.dim: REQUIRED
ffn.hidden: 32
ffn.num_experts: 4
norm: {ZOO}:Norm
norm.dim: REQUIRED
norm.eps: 0.5
tail: None
"""


def test_the_text_of_a_config():
    assert to_text(Block.Config(ffn=Experts.Config(), norm=Norm.Config(eps=0.5))) == GOLDEN


def test_the_text_parses_back():
    cfg = from_text(GOLDEN)
    assert cfg == Block.Config(ffn=Experts.Config(), norm=Norm.Config(eps=0.5))
    assert from_text("# a comment\n\n" + GOLDEN) == cfg


def test_order_and_missing_lines_do_not_matter():
    head, *rows = GOLDEN.splitlines()
    assert from_text("\n".join([head, *reversed(rows)])) == from_text(GOLDEN)
    assert from_text(f"{ZOO}:Norm\ndim: 3") == Norm.Config(dim=3)


def test_paths_are_sorted_as_numbers_and_words():
    cfg = Model.Config(blocks=tuple(Block.Config(dim=i) for i in range(11)))
    paths = [line.partition(":")[0] for line in to_text(cfg).splitlines()]
    dims = [path for path in paths if path.endswith("dim") and path.count(".") == 2]
    assert dims == [f"blocks.{i}.dim" for i in range(11)]
    assert from_text(to_text(cfg)) == cfg


def test_what_a_value_looks_like():
    cfg = Model.Config(
        named={"b": config_for(chain, parts=(relu, config_for(schedule))), "a: b": Tail.Config()},
        weights={"z": 1.0, "a": math.inf},
        note="two\nlines: 'x'",
        kind=Norm,
        extra={"k": [(1,), {}]},
    )
    lines = to_text(cfg).splitlines()
    for line in (
        "extra: {'k': [(1,), {}]}",
        f"kind: class {ZOO}:Norm",
        "named: dict",
        f"named['a: b']: {ZOO}:Tail",
        f"named.b: {ZOO}:chain()",
        "named.b.parts: tuple",
        f"named.b.parts.0: {ZOO}:relu",
        f"named.b.parts.1: {ZOO}:schedule()",
        "named.b.parts.1.peak: REQUIRED",
        """note: "two\\nlines: 'x'\"""",
        "weights: dict",
        "weights.a: inf",
    ):
        assert line in lines, line
    assert from_text(to_text(cfg)) == cfg


def test_equal_configs_have_equal_text():
    a = Model.Config(weights={"x": 1.0, "y": 2.0}, extra={"p": 1, "q": {"s": 1, "r": 2}})
    b = Model.Config(weights={"y": 2.0, "x": 1.0}, extra={"q": {"r": 2, "s": 1}, "p": 1})
    assert a == b and to_text(a) == to_text(b)


def test_a_public_name_is_preferred():
    optax = pytest.importorskip("optax")
    assert to_text(config_for(optax.adamw)).splitlines()[0] == "optax:adamw()"


def local_function() -> Any:
    def inner(x: float) -> float:
        return x

    return inner


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: x, r"^ffn\.activation: a lambda has no name to write"),
        (local_function(), r"^ffn\.activation: local_function\.<locals>\.inner is local"),
        (
            functools.partial(relu, 1.0),
            r"^ffn\.activation: .* cannot be written as text; describe a",
        ),
    ],
)
def test_functions_without_a_name_are_refused(value: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        to_text(Block.Config(ffn=Ffn.Config(activation=value)))


def test_values_without_text_are_refused():
    with pytest.raises(ConfigError, match=r"^extra: array\(\[1\]\) \(ndarray\) cannot be written"):
        to_text(Model.Config(extra=np.array([1])))


def test_a_local_class_has_no_text():
    class Local(Norm):
        pass

    with pytest.raises(ConfigError, match="is local to a function"):
        to_text(Local.Config())


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ConfigError, "the root: expected module:name"),
        ("no.such.module:X", ConfigError, "may not name 'no.such.module:X'"),
        (f"{ZOO}:Nrm", ConfigError, "has no 'Nrm'; did you mean 'Norm'"),
        (f"{ZOO}:relu", ConfigError, r"has no Config; a call of a function is written .*relu\(\)"),
        (
            f"{ZOO}:Norm\ndimm: 3",
            ConfigError,
            "the root: Norm.Config has no field 'dimm'; did you",
        ),
        (f"{ZOO}:Norm\ndim: 'x'", ConfigError, "Norm.Config.dim: expected int"),
        (f"{ZOO}:Norm\ndim: 1 + 1j * 2", ConfigError, "dim: cannot read the value"),
        (f"{ZOO}:Norm\ndim: __import__('os').getpid()", ConfigError, "dim: cannot read the value"),
        (f"{ZOO}:Norm\ndim: os:sep", ConfigError, "may not name 'os:sep'"),
        (f"{ZOO}:Norm\ndim 3", ConfigError, "not a line `path: value`: 'dim 3'"),
        (f"{ZOO}:Norm\ndim: 3\ndim: 4", ConfigError, "dim: two lines for one path"),
        (
            f"{ZOO}:Norm\ndim: 3\ndim.x: 4",
            ConfigError,
            "dim: '3' is a value, but there are lines below",
        ),
        (f"{ZOO}:Block\nnorm.eps: 4.0", ConfigError, "norm.eps: no line for norm"),
        (f"{ZOO}:Model\nmesh: tuple\nmesh.1: 4", ConfigError, "mesh: the elements are numbered 1"),
    ],
)
def test_a_text_that_cannot_be_read_says_where(text: str, error: type, message: str):
    with pytest.raises(error, match=message):
        from_text(text)


def test_diff_names_what_changed():
    a, b = Block.Config(dim=1), Block.Config(dim=2, ffn=Experts.Config())
    assert diff(a, a.clone()) == []
    assert diff(a, b) == [
        "  dim: 1 -> 2",
        f"  ffn: {ZOO}:Ffn -> {ZOO}:Experts",
        "+ ffn.num_experts: 4",
    ]
    assert diff(b, a)[-1] == "- ffn.num_experts: 4"
    assert diff(Norm.Config(), Tail.Config())[0] == f"  (root): {ZOO}:Norm -> {ZOO}:Tail"


# As `st.text()`, whose alphabet takes seconds to make the first time.
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
finite = st.floats(allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | words | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(words | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
tails: st.SearchStrategy[ConfigBase[Any]] = st.builds(Tail.Config, size=st.integers())
ffns = st.builds(Ffn.Config, dim=st.just(REQUIRED) | st.integers()) | st.builds(
    Experts.Config, num_experts=st.integers()
)
calls = st.builds(
    lambda parts, names: config_for(chain, parts=parts, names=names),
    st.tuples(plain, tails),
    st.dictionaries(words, plain | tails, max_size=2),
)
blocks = st.builds(Block.Config, ffn=ffns, tail=st.none() | tails)
models = st.builds(
    Model.Config,
    blocks=st.lists(blocks, max_size=3).map(tuple),
    named=st.dictionaries(words, tails | ffns | calls, max_size=3),
    mode=st.sampled_from(["fast", "exact"]),
    tags=st.lists(words),
    weights=st.dictionaries(words, finite, max_size=3),
    note=st.none() | words,
    dropout=st.none() | finite,
    ratio=st.integers() | finite,
    kind=st.sampled_from([int, Norm, Norm.Config]),
    extra=plain | calls | st.sampled_from([relu, Norm]) | st.lists(tails | plain, max_size=2),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(models)
def test_round_trip(cfg: Model.Config):
    text = to_text(cfg)
    twin = from_text(text)
    assert twin == cfg
    assert to_text(twin) == text
    assert diff(cfg, twin) == []
