"""Sweeps: what is tried, of supervised and RL experiments; what is refused; how the answer is drawn."""

import re
import shlex
from typing import Any
from xml.etree import ElementTree

import pytest

from axlearn_like.config import get_path, set_path
from experiments.registry import get
from mesh import UserError
from mesh.topology import parse_topology
from rl.experiment import RLExperiment
from tests.elsewhere import elsewhere
from tests.mesh.described import described_mesh
from tests.tools.aot.test_aot import HERE, needs_compiler, run_cli, tiny
from tools import cli
from tools.aot.candidates import Space, candidates
from tools.aot.plot import draw_sweep
from tools.aot.sweep import print_sweep

PLENTY = 1 << 35
SVG = "{http://www.w3.org/2000/svg}"


def test_all_shapes_that_divide_are_tried():
    found = candidates(tiny(), parse_topology("v6e:2x2"), PLENTY)
    meshes = {tuple(one.mesh.items()) for one in found}
    two, four = (("data", 2), ("fsdp", 2), ("tensor", 2)), (("data", 4), ("fsdp", 4), ("tensor", 4))
    pairs = {(a, b) for i, a in enumerate(two) for b in two[i + 1 :]}
    assert meshes == pairs | {(one,) for one in four}
    assert {one.microbatches for one in found if one.mesh == {"fsdp": 4}} == {1, 2, 4}  # of 16 rows
    assert {one.microbatches for one in found if one.mesh == {"tensor": 4}} == {1, 2, 4, 8}


def test_a_space_says_what_is_tried():
    space = Space(({"fsdp": 2, "sequence": 2}, {"fsdp": 4}), ("everything", "context"), (2,))
    found = candidates(tiny(), parse_topology("v6e:2x2"), PLENTY, space)
    tried = [(tuple(one.mesh.items()), one.remat, one.microbatches) for one in found]
    assert sorted(tried) == [
        (mesh, remat, 2)
        for mesh in ((("fsdp", 2), ("sequence", 2)), (("fsdp", 4),))
        for remat in ("context", "everything")
    ]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (Space(meshes=({"fsdp": 8},)), "--sweep-mesh fsdp 8 has 8 devices; v6e:2x2 has 4"),
        (Space(remats=("everythin",)), "no preset 'everythin'; did you mean 'everything'"),
    ],
)
def test_what_cannot_be_tried_is_refused(space, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        candidates(tiny(), parse_topology("v6e:2x2"), PLENTY, space)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--sweep --sweep-mesh fsdb=4", "--sweep-mesh fsdb=4: no axis 'fsdb'; did you mean 'fsdp'"),
        ("--sweep --sweep-mesh fsdp=two", "fsdp is 'two'; expected a size"),
        ("--sweep --plot no/such/x.svg", "there is no folder no/such"),
        ("--plot x.svg", "belong to a sweep; add --sweep"),
    ],
)
@needs_compiler
def test_words_that_make_no_sweep_are_refused(words, expected, capsys):
    assert cli.main(["aot", "demo_sft", "--topology", "v6e:2x2", *words.split()]) == 2
    assert expected in capsys.readouterr().err


def test_what_is_tried_of_an_rl_experiment_are_its_own_fields_and_batches_divide():
    cfg = get("demo")
    assert isinstance(cfg, RLExperiment.Config)
    found = candidates(cfg, parse_topology("v6e:2x4"), PLENTY)
    assert len({str(one) for one in found}) == len(found) > 20
    for one in found:
        changed = one.applied(cfg)
        assert (changed.trainer.mesh, get_path(changed, "policy.remat")) == (one.mesh, one.remat)
        assert changed.trainer.microbatches == one.microbatches
        changed.trainer.check_rows(described_mesh(None, **one.mesh))


def result(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    same = {"slices": 1, "devices": 4, "available": 32 << 30, "error": (0.9, 1.5), "experiment": "a<b"}
    return {"topology": "v6e:2x2", **same, "tried": rows, "best": rows[0], **changes}


def row(mesh: dict[str, int], **changes: Any) -> dict[str, Any]:
    figures = {"fits": True, "needed": 16 << 30, "arguments": 4 << 30, "estimated_step_s": 2.0, "mfu_estimate": 0.4}
    return {"mesh": mesh, "remat": "context", "microbatches": 2, "exposed_s": 0.1, "set": [], **figures, **changes}


def test_the_drawing_has_memory_and_step_to_scale_with_the_estimates_error():
    rows = [
        row({"fsdp": 4}),
        row({"fsdp": 2, "tensor": 2}, needed=8 << 30, estimated_step_s=4.0),
        row({"data": 4}, fits=False, needed=40 << 30, estimated_step_s=None, arguments=None),
    ]
    root = ElementTree.fromstring(draw_sweep(result(rows)))
    assert root.tag == f"{SVG}svg"
    bars = [one for one in root.iter(f"{SVG}rect") if one.get("class") in ("more", "held")]
    widths = [float(one.attrib["width"]) for one in bars]
    assert widths == pytest.approx([4 * widths[1], widths[1], 2 * widths[1], widths[1]], abs=0.2)
    ranges = [one.attrib["d"] for one in root.iter(f"{SVG}path") if one.get("class") == "range"]
    (low, high), (low2, high2) = (tuple(map(float, re.findall(r"^M([\d.]+) .*?H([\d.]+)M", d)[0])) for d in ranges)
    x, x2 = (float(one.attrib["cx"]) for one in root.iter(f"{SVG}circle"))
    second = (x2 - x) / 2  # pixels of a second: the two are 2 s apart
    assert (x - low, high - x) == pytest.approx((0.2 * second, 1.0 * second), abs=0.3)
    assert (x2 - low2, high2 - x2) == pytest.approx((0.4 * second, 2.0 * second), abs=0.3)
    words = " ".join(one.text or "" for one in root.iter(f"{SVG}text"))
    for part in ("a<b on v6e:2x2, 4 devices", "fsdp 2 x tensor 2", "does not fit: 40.0 GiB", "remat context", "32"):
        assert part in words, part


def test_a_drawing_names_in_each_line_what_is_not_common_to_all():
    drawn = draw_sweep(result([row({"fsdp": 4}), row({"fsdp": 4}, remat="everything", microbatches=1)]))
    assert "fsdp 4, context, 2 mb" in drawn and "fsdp 4, everything, 1 mb" in drawn


def test_the_best_is_printed_as_a_shell_takes_it(capsys):
    edits = ["trainer.mesh={'fsdp': 2, 'tensor': 2}", "policy.remat=context"]
    print_sweep(result([row({"fsdp": 4}, set=edits)]))
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words == ["best:", "--set", edits[0], "--set", edits[1]]
    cfg = get("demo")
    for edit in words[2::2]:
        set_path(cfg, *edit.split("=", 1))
    assert get_path(cfg, "trainer.mesh") == {"fsdp": 2, "tensor": 2}


@pytest.mark.full
@needs_compiler
def test_an_rl_experiment_is_swept_and_drawn(tmp_path):
    words = ["demo", "--topology", "v6e:2x2", "--sweep", "--sweep-mesh", "data=2,fsdp=2", "--sweep-mesh", "fsdp=4"]
    words += ["--sweep-remat", "nothing", "--sweep-microbatches", "2", "--json", "--plot", str(tmp_path / "sweep.svg")]
    found = elsewhere(run_cli, words, timeout=280)["json"]
    assert found["experiment"] == "demo" and [one["fits"] for one in found["tried"]] == [True, True]
    assert all("trainer.microbatches=2" in one["set"] for one in found["tried"])
    assert found["best"] == min(found["tried"], key=lambda one: one["estimated_step_s"])
    assert "data 2 x fsdp 2" in (tmp_path / "sweep.svg").read_text()


@pytest.mark.full
@needs_compiler
def test_a_shape_that_cannot_be_is_said_so_in_its_line():
    words = [HERE, "--topology", "v6e:2x4", "--sweep", "--sweep-mesh", "tensor=8", "--sweep-remat", "everything"]
    found = elsewhere(run_cli, [*words, "--sweep-microbatches", "1", "--json"], timeout=280)["json"]
    assert found["best"] is None and "num_kv_heads=4" in found["tried"][0]["why"]
