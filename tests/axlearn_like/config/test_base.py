"""The config class itself: fields, checks, owners, build."""

import copy
import pickle
import subprocess
import sys
from typing import Any, assert_type

import numpy as np
import pytest

from axlearn_like.config import (
    REQUIRED,
    ConfigBase,
    ConfigError,
    Configurable,
    config_for,
    config_key,
    from_text,
    record_resolved,
    resolve,
    set_path,
    text_lines,
    to_text,
)
from tests.axlearn_like.config.zoo import Block, Experts, Ffn, Model, Norm, Tail, chain, schedule


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_build_makes_the_owner_from_a_private_copy():
    cfg = Norm.Config(dim=3)
    norm = cfg.build(seed=7)
    assert type(norm) is Norm and norm.seed == 7
    cfg.dim = 4
    assert norm.cfg.dim == 3
    norm.cfg.dim = 5
    assert cfg.dim == 4


def test_a_key_is_that_of_equal_configs_alone_and_does_not_follow_edits():
    cfg = Block.Config(dim=3)
    key = config_key(cfg)
    assert key == config_key(Block.Config(dim=3)) == config_key(cfg.clone())
    others = [cfg.clone(dim=4), cfg.clone(ffn=Experts.Config()), cfg.clone(ffn=Ffn.Config(activation=abs))]
    assert len({hash(key), *(hash(config_key(other)) for other in others)}) == 4
    assert all(config_key(other) != key for other in others)
    cfg.dim = 4
    assert config_key(cfg) == config_key(others[0]) != key
    assert len({config_key({"a": value}) for value in (1, 1.0, True, "1")}) == 4, "a trace differs by type too"
    with pytest.raises(TypeError, match="unhashable"):
        hash(config_key((cfg, np.zeros(2))))


def test_the_type_checker_knows_what_is_built():
    # Nothing happens at run time: `make lint` fails if pyright infers other types.
    assert_type(Norm.Config(dim=3).build(seed=1), Norm)
    assert_type(Block.Config().norm.set(dim=3).clone(), Norm.Config)
    assert_type(config_for(len, obj="abc").build(), int)


def test_building_changes_nothing_in_the_callers_tree():
    cfg = Model.Config(dim=8)
    before = cfg.clone()
    cfg.build()
    assert cfg == before
    assert cfg.blocks[0].dim is REQUIRED


def test_defaults_are_not_shared_between_configs():
    a, b = Model.Config(dim=1), Model.Config(dim=1)
    a.blocks[0].norm.eps = 0.5
    a.tags.append("x")
    assert b.blocks[0].norm.eps == Block.Config().norm.eps == 1e-6
    assert b.tags == []


def test_a_config_that_stands_in_two_places_is_two_after_clone():
    shared = Block.Config()
    twin = Model.Config(dim=1, blocks=(shared, shared)).clone()
    twin.blocks[0].dim = 9
    assert twin.blocks[1].dim is REQUIRED and shared.dim is REQUIRED


def test_int_becomes_float_where_float_is_declared():
    eps = Norm.Config(eps=1).eps
    assert eps == 1.0 and type(eps) is float
    assert type(Norm.Config(eps=np.float64(0.5)).eps) is float
    assert type(Model.Config(ratio=2).ratio) is int
    assert type(Model.Config(dropout=0).dropout) is float


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dim": True}, r"Model\.Config\.dim: expected int, got True \(bool\)"),
        ({"dim": 2.0}, r"Model\.Config\.dim: expected int, got 2\.0"),
        ({"dropout": True}, r"Model\.Config\.dropout: expected float \| None, got True"),
        ({"mode": "slow"}, r"mode: expected Literal\['fast', 'exact'\], got 'slow'"),
        ({"mesh": (1, "a")}, r"Model\.Config\.mesh\[1\]: expected int, got 'a'"),
        ({"mesh": [1, 2]}, r"Model\.Config\.mesh: expected tuple\[int, \.\.\.\], got \[1, 2\]"),
        ({"tags": "ab"}, r"tags: expected list\[str\], got 'ab'"),
        ({"tags": ["a", 1]}, r"tags\[1\]: expected str, got 1"),
        ({"weights": {"a": "b"}}, r"weights\['a'\]: expected float, got 'b'"),
        ({"weights": {1: 1.0}}, r"weights key 1: expected str, got 1"),
        ({"blocks": (Norm.Config(),)}, r"blocks\[0\]: expected Block\.Config, got Norm\.Config"),
        ({"kind": 3}, r"kind: expected type, got 3"),
    ],
)
def test_type_errors_name_the_field_and_the_element(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Model.Config(**values)


def test_a_field_of_configs_of_a_class_takes_configs_of_its_subclasses_only():
    assert Block.Config(ffn=Experts.Config()).ffn == Experts.Config()
    with pytest.raises(ConfigError, match=r"Block\.Config\.ffn: expected ConfigBase\[Ffn\]"):
        Block.Config(ffn=Tail.Config())  # pyright: ignore[reportArgumentType]


def test_a_list_changed_in_place_is_checked_at_build():
    cfg = Model.Config(dim=1)
    cfg.tags.append(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"^Model\.tags\[0\]: expected str, got 3"):
        cfg.build()


@pytest.mark.parametrize(
    "act",
    [
        lambda: Norm.Config(epss=1.0),  # pyright: ignore[reportCallIssue]
        lambda: Norm.Config().set(epss=1.0),
        lambda: Norm.Config().clone(epss=1.0),
        lambda: setattr(Norm.Config(), "epss", 1.0),
        lambda: Norm.Config().epss,  # pyright: ignore[reportAttributeAccessIssue]
    ],
)
def test_an_unknown_field_is_an_error_with_the_nearest_name(act: Any):
    with pytest.raises(ConfigError, match=r"Norm\.Config has no field 'epss'; did you mean 'eps'"):
        act()


class Renamed(Configurable):
    class Config(ConfigBase["Renamed"], renamed={"epsilon": "eps"}):
        eps: float = 1e-6

    def __init__(self, cfg: Config):
        self.cfg = cfg


class Inherits(Renamed):
    class Config(Renamed.Config, renamed={"width": "dim"}):
        dim: int = 1


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Renamed.Config(epsilon=1.0), r"^Renamed\.Config: epsilon is now eps$"),  # pyright: ignore[reportCallIssue]
        (lambda: Inherits.Config().set(epsilon=1.0), r"^Inherits\.Config: epsilon is now eps$"),
        (lambda: Inherits.Config().set(width=2), r"^Inherits\.Config: width is now dim$"),
        (lambda: set_path(Inherits.Config(), "width", "2"), r"^Inherits: width is now dim$"),
        (lambda: from_text(to_text(Renamed.Config()).replace("eps:", "epsilon:")), r"Config: epsilon is now eps$"),
    ],
)
def test_an_earlier_name_of_a_field_is_an_error_with_its_name_now(act: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        act()


def test_a_renamed_field_must_exist():
    with pytest.raises(ConfigError, match=r"old: expected an earlier name of a field, got renamed to 'gone'"):

        class Wrong(ConfigBase[Any], renamed={"old": "gone"}):
            eps: float = 1e-6


def test_a_far_off_name_lists_the_fields():
    with pytest.raises(ConfigError, match=r"no field 'zzz'; known: dim, eps"):
        Norm.Config().set(zzz=1)


def test_set_is_all_or_nothing():
    cfg = Norm.Config(dim=3)
    with pytest.raises(ConfigError):
        cfg.set(dim=4, eps="x")
    assert cfg == Norm.Config(dim=3)


def test_required_is_named_with_owner_and_full_path():
    with pytest.raises(ConfigError, match=r"^Model\.dim is REQUIRED by Model\.Config and not set"):
        Model.Config().build()

    class Careless(Configurable):  # It does not tell its children their size.
        class Config(ConfigBase["Careless"]):
            parts: tuple[ConfigBase, ...] = (Tail.Config(), Norm.Config())
            more: dict[str, Norm.Config] = {"a.b": Norm.Config()}

        def __init__(self, cfg: Config):
            self.parts = [c.clone().build() for c in cfg.parts]

    with pytest.raises(ConfigError, match=r"^Careless\.parts\.1\.dim is REQUIRED") as caught:
        Careless.Config().build()
    assert notes(caught.value) == ["while building Careless"]
    with pytest.raises(ConfigError, match=r"^Block\.dim is REQUIRED"):
        Block.Config().build()


def test_every_missing_field_is_named_at_once():
    class Pair(Configurable):
        class Config(ConfigBase["Pair"]):
            left: int = REQUIRED
            right: int = REQUIRED

    with pytest.raises(ConfigError, match=r"Pair\.left, Pair\.right are REQUIRED"):
        Pair.Config().build()


def test_an_error_inside_a_child_says_where_it_was_being_built():
    class Faulty(Ffn):
        def __init__(self, cfg: Any, *, seed: int = 0):
            raise RuntimeError("boom")

    cfg = Model.Config(dim=2)
    cfg.blocks[1].ffn = Faulty.Config()
    with pytest.raises(RuntimeError, match="boom") as caught:
        cfg.build()
    assert notes(caught.value) == ["while building Model.blocks.1.ffn"]


def test_required_refuses_to_be_a_truth_value_and_is_one_object():
    with pytest.raises(ConfigError, match="REQUIRED config field was used before it was set"):
        bool(Norm.Config().dim)
    assert copy.deepcopy(REQUIRED) is REQUIRED
    assert pickle.loads(pickle.dumps(REQUIRED)) is REQUIRED


def test_a_field_without_default_must_be_given():
    class Strict(Configurable):
        class Config(ConfigBase["Strict"]):
            size: int

    with pytest.raises(ConfigError, match=r"Strict\.Config needs size"):
        Strict.Config()  # pyright: ignore[reportCallIssue]
    assert Strict.Config(size=2).size == 2


def test_a_subclass_config_builds_its_own_owner():
    experts = Experts.Config(dim=2, num_experts=3).build()
    assert type(experts) is Experts and type(Ffn.Config(dim=2).build()) is Ffn


def test_an_inherited_config_is_bound_to_the_subclass():
    class Child(Norm):
        pass

    assert type(Child.Config(dim=1).build()) is Child
    assert issubclass(Child.Config, Norm.Config) and Child.Config is not Norm.Config
    assert type(Norm.Config(dim=1).build()) is Norm
    assert Child.Config() != Norm.Config()


def test_another_class_cannot_take_a_config_over():
    with pytest.raises(ConfigError, match=r"Thief\.Config is Norm\.Config, which builds Norm; write"):

        class Thief(Configurable):
            Config = Norm.Config


def test_two_inherited_configs_must_be_settled():
    with pytest.raises(ConfigError, match=r"inherits Tail\.Config and Norm\.Config; define its own"):

        class Both(Tail, Norm):
            pass


def test_a_value_without_annotation_is_refused():
    with pytest.raises(ConfigError, match=r"lr = 0\.1 has no annotation"):

        class Loose(ConfigBase):
            lr = 0.1


def test_a_field_cannot_hide_a_method():
    with pytest.raises(ConfigError, match=r"build: the name is taken"):

        class Hiding(ConfigBase):
            build: int = 3  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


def test_a_config_without_owner_holds_values_but_builds_nothing():
    class Plain(ConfigBase):
        a: int = 1

    assert Plain(a=2).a == 2
    with pytest.raises(ConfigError, match="belongs to no class"):
        Plain().build()


def test_an_error_inside_a_property_is_its_own():
    class Derived(ConfigBase):
        a: int = 1

        @property
        def double(self) -> int:
            return self.b * 2  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.raises(ConfigError, match="has no field 'b'"):
        print(Derived().double)


def test_an_annotation_that_does_not_resolve_says_so():
    class Lost(ConfigBase):
        a: "NoSuchName" = None  # noqa: F821 # pyright: ignore

    with pytest.raises(ConfigError, match=r"its annotation 'NoSuchName' names 'NoSuchName'"):
        Lost(a=3)


def test_copies_and_pickles_are_equal_configs():
    cfg = Model.Config(dim=3, named={"opt": config_for(schedule, peak=1.0)})
    for twin in (copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg)), cfg.clone()):
        assert twin == cfg and twin is not cfg
        twin.named["opt"].peak = 2.0
        assert twin != cfg


def test_function_config_calls_the_function():
    cfg = config_for(schedule, peak=3e-4)
    assert cfg.set(warmup=5).build() == ("schedule", 3e-4, 5, "cosine")
    with pytest.raises(ConfigError, match=r"schedule\.Config has no field 'warm_up'; did you mean"):
        config_for(schedule, warm_up=1)
    with pytest.raises(ConfigError, match=r"schedule\.peak is REQUIRED"):
        config_for(schedule).build()
    assert config_for(schedule).build(peak=1.0)[1] == 1.0


def test_function_configs_nest_and_take_variadic_arguments():
    part = config_for(schedule, peak=1.0)
    built = config_for(chain, parts=(part, 2), names={"last": part}).build()
    made = ("schedule", 1.0, 10, "cosine")
    assert built == ("chain", (made, 2), {"last": made})


@pytest.mark.slow
@pytest.mark.numerics
def test_function_config_of_a_third_party_function():
    optax = pytest.importorskip("optax")
    clip = config_for(optax.clip_by_global_norm, max_norm=1.0)
    adamw = config_for(optax.adamw, learning_rate=0.1)
    optimizer = config_for(optax.chain, args=(clip, adamw)).build()
    params = {"w": np.ones(3, np.float32)}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-3)


def test_the_resolved_config_shows_what_parents_filled_in():
    cfg = Model.Config(dim=8)
    with record_resolved() as resolved:
        cfg.build()
    lines = text_lines(resolved.config)
    assert "REQUIRED" not in lines.values()
    assert lines["blocks.1.norm.dim"] == lines["blocks.0.ffn.dim"] == "8"
    assert lines.keys() == text_lines(cfg).keys()
    assert resolve(cfg, lambda c: c.build(seed=1)) == resolved.config
    assert cfg.blocks[0].dim is REQUIRED


def test_nothing_recorded_is_an_error():
    with record_resolved() as resolved:
        pass
    with pytest.raises(LookupError, match="nothing was built"):
        print(resolved.config)


def test_importing_the_config_system_imports_no_jax_and_no_numpy():
    code = (
        "import sys, axlearn_like.config.text, axlearn_like.config.resolve;"
        "print(sorted({'jax', 'numpy', 'flax', 'rich'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
