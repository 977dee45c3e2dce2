"""Edits by path, by class and by mesh rule."""

from typing import Any

import pytest

from axlearn_like.config import (
    REQUIRED,
    ConfigBase,
    ConfigError,
    apply_mesh_rules,
    config_for,
    get_path,
    label,
    replace,
    set_path,
    split_path,
    walk,
    walk_configs,
)
from axlearn_like.config.parse import parse_value
from tests.axlearn_like.config.zoo import Block, Experts, Ffn, Model, Norm, Tail, chain, relu, schedule


def model() -> Model.Config:
    return Model.Config(dim=8, named={"opt": config_for(schedule, peak=1.0), "a.b": Tail.Config()})


def test_walk_opens_configs_in_tuples_and_dicts():
    leaves = dict(walk(model()))
    assert leaves["blocks.1.ffn.hidden"] == 32
    assert leaves["named.opt.peak"] == 1.0
    assert leaves["named['a.b'].size"] == 1
    assert leaves["mesh"] == (1, 1)
    assert not any(isinstance(value, ConfigBase) for value in leaves.values())
    configs = dict(walk_configs(model()))
    assert type(configs[""]) is Model.Config and type(configs["blocks.0.norm"]) is Norm.Config


def test_every_walked_path_leads_to_its_value():
    cfg = model()
    for path, value in [*walk(cfg), *list(walk_configs(cfg))[1:]]:
        assert get_path(cfg, path) is value


@pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a..b", "a b", "a[b]", "a['x'", "a['x']b"])
def test_a_malformed_path_is_refused(path: str):
    with pytest.raises(ConfigError, match="is not a path like"):
        split_path(path)


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("blocks.0.norm.eps", "3e-4", 3e-4),
        ("blocks.1.dim", "16", 16),
        ("dim", "0x10", 16),
        ("mesh", "4,2", (4, 2)),
        ("mesh", "[4, 2]", (4, 2)),
        ("mesh", "8", (8,)),
        ("mesh.1", "4", 4),
        ("tags", "math,logic", ["math", "logic"]),
        ("weights", "{'math': 1}", {"math": 1.0}),
        ("mode", "exact", "exact"),
        ("note", "3", "3"),
        ("note", "'quoted'", "quoted"),
        ("note", "none", None),
        ("dropout", "None", None),
        ("dropout", "1", 1.0),
        ("ratio", "2", 2),
        ("ratio", "0.5", 0.5),
        ("extra", "[1, 'a']", [1, "a"]),
        ("extra", "free text", "free text"),
        ("kind", "builtins:float", float),
        ("named.opt.warmup", "100", 100),
        ("named.opt.mode", "linear", "linear"),
        ("named['a.b'].size", "5", 5),
        ("blocks.0.ffn.activation", "tests.axlearn_like.config.zoo:relu", relu),
        ("blocks.0.ffn", "tests.axlearn_like.config.zoo:Experts", Experts.Config()),
        ("named.opt", "tests.axlearn_like.config.zoo:chain()", config_for(chain)),
    ],
)
def test_text_is_parsed_by_the_annotation(path: str, text: str, value: Any):
    cfg = set_path(model(), path, text)
    assert get_path(cfg, path) == value
    assert type(get_path(cfg, path)) is type(value)


@pytest.mark.parametrize(
    ("path", "value", "error", "message"),
    [
        ("dim", "fast", ConfigError, r"^run\.dim: expected int, got 'fast'"),
        ("dim", "true", ConfigError, r"^run\.dim: expected int, got 'true'"),
        ("dim", True, ConfigError, r"^run\.dim: expected int, got True"),
        (
            "blocks.0.norm.eps",
            "x",
            ConfigError,
            r"^run\.blocks\.0\.norm\.eps: expected float, got 'x'",
        ),
        ("mode", "slow", ConfigError, r"^run\.mode: expected Literal"),
        ("mesh", "4,a", ConfigError, r"^run\.mesh: expected tuple"),
        ("blocks.0.norm", "nowhere:Norm", ConfigError, r"may not name 'nowhere:Norm'"),
        (
            "blocks.0.nrm.eps",
            "1",
            ConfigError,
            r"^run\.blocks\.0 has no field 'nrm'; did you mean",
        ),
        (
            "blocks.0.norm.epss",
            "1",
            ConfigError,
            r"^run\.blocks\.0\.norm has no field 'epss'; did",
        ),
        ("blocks.2.dim", "1", ConfigError, r"^run\.blocks has 2 elements, none at '2'"),
        ("named.opti.peak", "1", ConfigError, r"^run\.named has no key 'opti'; did you mean 'opt'"),
        ("dim.x", "1", ConfigError, r"^run\.dim is 8 \(int\), which has no 'x'"),
    ],
)
def test_a_bad_edit_names_the_full_path(path: str, value: Any, error: type, message: str):
    cfg = label(model(), "run")
    before = cfg.clone()
    with pytest.raises(error, match=message.replace("run", "run")):
        set_path(cfg, path, value)
    assert cfg == before


def test_an_unlabelled_root_goes_by_its_owner():
    with pytest.raises(ConfigError, match=r"^Model has no field 'dimm'"):
        get_path(model(), "dimm")


def test_setting_inside_a_tuple_leaves_its_other_elements_alone():
    cfg = model()
    kept = cfg.blocks[1]
    set_path(cfg, "blocks.0", Block.Config(dim=3))
    assert cfg.blocks[0].dim == 3 and cfg.blocks[1] is kept


def test_replace_swaps_every_match_and_counts():
    cfg = model()
    n = replace(cfg, Ffn.Config, lambda c: Experts.Config(hidden=c.hidden * 2, num_experts=16))
    assert n == 2
    assert [type(block.ffn) for block in cfg.blocks] == [Experts.Config, Experts.Config]
    assert cfg.build().blocks[0].ffn.cfg == Experts.Config(dim=8, hidden=64, num_experts=16)


def test_replace_can_be_narrowed_by_a_glob():
    cfg = model()
    assert replace(cfg, Ffn.Config, lambda c: c.set(hidden=1), glob="blocks.1.*") == 1
    assert (cfg.blocks[0].ffn, cfg.blocks[1].ffn) == (Ffn.Config(), Ffn.Config(hidden=1))


def test_replace_reaches_children_before_their_parents():
    cfg, seen = model(), []
    replace(cfg, ConfigBase, lambda c: seen.append(type(c)) or c, glob="blocks.0*")
    assert seen == [Ffn.Config, Norm.Config, Block.Config]


def test_replace_puts_copies_where_the_edit_returns_one_object():
    cfg, shared = model(), Ffn.Config()
    replace(cfg, Ffn.Config, lambda c: shared)
    cfg.blocks[0].ffn.set(hidden=1)
    assert cfg.blocks[1].ffn == Ffn.Config()


def test_replace_gives_a_config_that_stands_in_two_places_to_the_edit_once():
    twice = Block.Config()
    cfg = model().set(blocks=(twice, twice))
    assert replace(cfg, Ffn.Config, lambda c: Experts.Config(hidden=c.hidden * 2)) == 2
    assert [block.ffn for block in cfg.blocks] == [Experts.Config(hidden=64)] * 2
    cfg.set(blocks=(Block.Config(ffn=(ffn := Ffn.Config())), Block.Config(ffn=ffn)))
    replace(cfg, Ffn.Config, lambda c: c.set(hidden=c.hidden * 2))
    assert [block.ffn for block in cfg.blocks] == [Ffn.Config(hidden=64)] * 2


def test_replace_of_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"Model has no Experts\.Config$"):
        replace(model(), Experts.Config, lambda c: c)
    with pytest.raises(ConfigError, match=r"it is at: blocks\.0\.norm, blocks\.1\.norm"):
        replace(model(), Norm.Config, lambda c: c, glob="nowhere.*")
    with pytest.raises(ConfigError, match=r"no Model\.Config"):
        replace(model(), Model.Config, lambda c: c)


def test_replace_refuses_what_does_not_fit():
    with pytest.raises(ConfigError, match=r"the edit returned None, not a config"):
        replace(model(), Norm.Config, lambda c: None)  # pyright: ignore
    with pytest.raises(ConfigError, match=r"Model\.blocks\.1\.norm: expected Norm\.Config"):
        replace(model(), Norm.Config, lambda c: Tail.Config())


RULES = [
    (r"tpu-v5p-\d+", [("mode", "exact"), lambda cfg: cfg.set(mesh=(8, 4))]),
    (r"cpu.*", [("mesh", "1,2"), ("blocks.0.norm.eps", 0.5)]),
    (r".*-8", [("dim", 1)]),
]


def test_the_first_matching_mesh_rule_is_applied():
    cfg = apply_mesh_rules(model(), RULES, "tpu-v5p-8")
    assert (cfg.mode, cfg.mesh, cfg.dim) == ("exact", (8, 4), 8)
    cfg = apply_mesh_rules(model(), RULES, "cpu-2")
    assert (cfg.mode, cfg.mesh, cfg.blocks[0].norm.eps) == ("fast", (1, 2), 0.5)


def test_no_matching_mesh_rule_is_an_error():
    with pytest.raises(ConfigError, match=r"Model has no mesh rule for 'gpu-h100-4'; its rules: 'tpu"):
        apply_mesh_rules(model(), RULES, "gpu-h100-4")
    with pytest.raises(ConfigError, match="no mesh rule for 'xtpu-v5p-16'"):
        apply_mesh_rules(model(), RULES, "xtpu-v5p-16")


def test_required_survives_edits_elsewhere():
    cfg = set_path(model(), "blocks.0.norm.eps", "1")
    assert cfg.blocks[0].dim is REQUIRED


def test_a_wrong_name_for_one_of_several_kinds_is_said_once():
    zoo = Norm.__module__
    with pytest.raises(ConfigError) as refused:
        parse_value(f"{zoo}:Nrm", Norm.Config | Ffn.Config | Block.Config, "run.part")
    expected = "run.part: expected Norm.Config | Ffn.Config | Block.Config, got"
    assert str(refused.value) == f"{expected} '{zoo}:Nrm' (module '{zoo}' has no 'Nrm'; did you mean 'Norm'?)"
