"""The rules of fields: where they are applied, in which order, and what their errors name."""

from typing import Any

import pytest

from axlearn_like.config import REQUIRED, ConfigBase, ConfigError, Configurable, label
from mesh.errors import UserError


class Leaf(Configurable):
    class Config(ConfigBase["Leaf"]):
        size: int = REQUIRED
        count: int | None = None

        def check_fields(self) -> None:
            self.require_least(1, "size", "count")

    def __init__(self, cfg: Config):
        self.cfg = cfg


class Tree(Configurable):
    class Config(ConfigBase["Tree"]):
        size: int = 8
        parts: int = 2
        own: Leaf.Config = Leaf.Config()
        leaves: tuple[Leaf.Config, ...] = ()
        named: dict[str, Leaf.Config] = {}

        def check_fields(self) -> None:
            self.require("size", self.size % self.parts == 0, f"a multiple of parts={self.parts}")

        def check(self) -> None:
            super().check()
            self.own.filled_from(self).check()

    def __init__(self, cfg: Config):
        self.cfg = cfg


def refused(cfg: ConfigBase[Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        cfg.check()
    return caught.value


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"size": 9}, "Tree.size", "expected a multiple of parts=2, got 9"),
        ({"leaves": (Leaf.Config(size=1), Leaf.Config(size=0))}, "Tree.leaves.1.size", "expected 1 or more, got 0"),
        ({"named": {"a.b": Leaf.Config(size=1, count=0)}}, "Tree.named['a.b'].count", "expected 1 or more, got 0"),
        ({"own": Leaf.Config(count=-1)}, "Tree.own.count", "expected 1 or more, got -1"),
        ({"size": -2}, "Tree.own.size", "expected 1 or more, got -2"),  # as its parent fills it
        ({"size": 9, "leaves": (Leaf.Config(size=0),)}, "Tree.size", "expected a multiple"),  # from the top down
        ({"parts": REQUIRED}, "Tree.parts", "REQUIRED by Tree.Config and not set"),
    ],
    ids=str,
)
def test_an_error_names_the_path_and_what_was_expected(changes: dict[str, Any], path: str, message: str):
    error = refused(Tree.Config(**changes))
    assert error.path == path
    assert str(error).startswith(path) and message in str(error)


def test_the_paths_begin_with_the_label_of_the_root():
    assert refused(label(Tree.Config(own=Leaf.Config(count=0)), "demo")).path == "demo.own.count"


def test_what_a_parent_has_yet_to_fill_is_left_to_it():
    Tree.Config(leaves=(Leaf.Config(count=0),)).check()  # of no size: who builds it sets that, and has it checked


def test_no_object_has_fields_that_its_config_refuses():
    with pytest.raises(ConfigError, match=r"^Leaf\.size: expected 1 or more, got 0"):
        Leaf.Config(size=0).build()
    assert Leaf.Config(size=1).build().cfg.size == 1


def test_an_error_of_a_called_function_names_the_field():
    cfg = Leaf.Config(size=1)
    with pytest.raises(ConfigError, match=r"^Leaf\.size: no codec of that name$") as caught:
        with cfg.errors_in("size"):
            raise UserError("no codec of that name")
    assert caught.value.path == "Leaf.size"


def test_a_field_for_configs_of_any_class_takes_them():
    class Holder(Configurable):
        class Config(ConfigBase["Holder"]):
            one: ConfigBase[Any] = REQUIRED
            other: ConfigBase[Leaf] = REQUIRED

    cfg = Holder.Config(one=Tree.Config(), other=Leaf.Config(size=1))
    assert isinstance(cfg.set(one=Leaf.Config(size=1)).one, Leaf.Config)
    with pytest.raises(ConfigError, match="other"):
        cfg.set(other=Tree.Config())
