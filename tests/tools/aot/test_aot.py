"""`axl aot`: a tiny decoder's steps for TPUs, what is refused before anything is compiled, and sweeps."""

import contextlib
import io
import json
from typing import Any

import pytest
from rich.console import Console

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input import SupervisedInput
from axlearn_like.learner import Constant, Learner
from axlearn_like.training.trainer import Trainer
from mesh.topology import find_compiler, parse_topology
from models.dense import dense
from tests.elsewhere import elsewhere
from tools import cli
from tools.aot.table import print_report

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="the TPU compiler (libtpu) is not installed")
LAYERS = 3
HERE = f"{__name__}:tiny"


class NoData(Configurable):
    class Config(ConfigBase["NoData"]):
        pass


def tiny(**changes: Any) -> Trainer.Config:
    """An experiment, to be found by name; its data are never read."""
    model = dense(
        vocab_size=512, dim=256, hidden=512, num_layers=LAYERS, num_heads=4, num_kv_heads=4, head_dim=64,
        theta=1e4, eps=1e-5, tied=False, max_length=4096,
    )  # fmt: skip
    return Trainer.Config(
        model=model.clone(dtype="bfloat16", remat="everything"),
        input=SupervisedInput.Config(source=NoData.Config(), seq_len=128, batch_size=16),
        learner=Learner.Config(schedule=Constant.Config(lr=1e-3)),
        mesh={"fsdp": -1},
        mesh_rules=(("tpu-v5p-.*", {"mesh": {"fsdp": 2, "tensor": 2}}), (".*", {})),
        num_steps=10,
    ).clone(**changes)


@pytest.mark.full  # test_golden_compiles.py compiles a step and states its memory in every run
@needs_compiler
def test_a_train_step_is_accounted_for():
    """Tiny decoder; on v5p the rules make its mesh fsdp 2 x tensor 2."""
    words = [HERE, "--topology", "v5p-8", "--json"]
    report = elsewhere(run_cli, words, timeout=280)["json"]
    assert report["fits"] and report["oom"] is None and report["advice"] == []
    assert report["mesh"] == {"fsdp": 2, "tensor": 2} and report["devices"] == 4
    tokens, matrices = 16 * 128, LAYERS * (4 * 256 * 256 + 3 * 256 * 512) + 256 * 512
    pairs = 16 * 128 * 129 / 2
    assert report["flops_analytic"] == 3 * (2 * tokens * matrices + pairs * 4 * LAYERS * 256)
    assert report["flops_executed"] > report["flops_analytic"]  # layers are recomputed, and attention is not halved
    hbm = report["hbm"]
    parameters = (matrices + 512 * 256) * 4 / 4 * 3  # float32, two moments; over four devices
    assert hbm["arguments"] == pytest.approx(parameters, rel=0.05)
    assert hbm["alias"] == pytest.approx(hbm["output"], rel=0.01)  # the state is donated
    assert hbm["arguments"] < hbm["peak"] < hbm["available"]
    # Two sums over tensor in a layer's forward pass, as in Megatron (or a scatter and a gather), and as many backward.
    sums = sum(row["count"] for kind, row in report["collectives"]["tensor"].items() if kind != "all-gather")
    assert sums >= 4 * LAYERS
    assert set(report["collectives"]) <= {"fsdp", "tensor", "fsdp+tensor"}
    assert report["unknown_loops"] == 0
    assert 0 < report["roofline_s"]["compute"] < report["estimated_step_s"]
    assert 0 < report["mfu_estimate"] < 1
    assert "tokens" not in str(sorted(report))  # no throughput is ever stated
    assert len(report["largest_buffers"]) == 10
    assert any("Block" in row["path"] for row in report["largest_buffers"])
    assert set(report["trust"]) >= {"hbm", "collectives", "estimated_step_s", "mfu_estimate"}


@pytest.mark.full
@needs_compiler
def test_an_evaluation_gathers_each_matrix_of_a_layer_once():
    found = elsewhere(run_cli, [HERE, "--topology", "v6e:2x2", "--step", "eval", "--json"], timeout=280)["json"]
    gathered = found["collectives"]["fsdp"]["all-gather"]
    layer = 4 * 256 * 256 + 3 * 256 * 512  # q, k, v, out, gate, up, down
    least = LAYERS * layer * 2 * 3 / 4  # bfloat16, of which three quarters come from others
    assert gathered["count"] >= 7 * LAYERS
    assert least <= gathered["bytes"] <= least + 2 * 512 * 256 * 4 + 16 * 128 * 256 * 4  # and embedding, head, tokens
    assert found["flops_executed"] < 1.3 * found["flops_analytic"]


@pytest.mark.full
@needs_compiler
def test_what_goes_between_slices_is_apart_from_what_goes_within():
    """Four parts of the data, two in each of two slices: these share their gradients first."""
    words = ["--topology", "v6e:2x2", "--slices", "2", "--set", "mesh={'data': 4, 'fsdp': 2}"]
    found = elsewhere(run_cli, [HERE, *words, "--set", "slices={'data': 2}", "--json"], timeout=280)["json"]
    assert (found["slices"], found["devices"], found["mesh"]) == (2, 8, {"data": 4, "fsdp": 2})
    assert set(found["collectives"]) == {"data", "fsdp", "data+fsdp", "data between slices"}
    gradients = (LAYERS * (4 * 256 * 256 + 3 * 256 * 512) + 2 * 512 * 256) * 2  # bytes, in bfloat16
    between = found["collectives"]["data between slices"]
    assert set(between) == {"all-reduce"}  # of the quarter of the gradients that each device of a slice has
    assert gradients / 4 <= between["all-reduce"]["bytes"] < 1.1 * gradients / 4
    assert found["roofline_s"]["link data between slices"] > 2 * found["roofline_s"]["link data"]


@pytest.mark.full
@needs_compiler
def test_what_does_not_fit_comes_with_what_to_change():
    sets = ["--set", "model.num_layers=30000", "--set", "model.remat=nothing"]
    found = elsewhere(run_cli, [HERE, "--topology", "v6e:1x1", "--json", *sets], timeout=280)["json"]
    assert found["fits"] is False and found["hbm"] is None and found["estimated_step_s"] is None
    assert found["oom"]["available"] < found["oom"]["needed"]
    assert any("more devices" in line for line in found["advice"][:1])  # the state alone is too large
    assert any("--set model.remat=everything" in line for line in found["advice"])
    assert any("--set microbatches=2" in line for line in found["advice"])
    assert found["largest_buffers"][0]["bytes"] >= 30_000 * 16 * 128 * 256 * 2  # kept of each layer
    assert all("Decoder.hidden" in row["path"] for row in found["largest_buffers"][:3])


@pytest.mark.full
@needs_compiler
def test_a_sweep_ranks_what_fits_and_goes_on_where_it_stopped(tmp_path):
    words = [HERE, "--topology", "v6e:1x1", "--sweep", "--sweep-limit", "1", "--json"]
    first, again = elsewhere(run_twice, [*words, "--sweep-cache", str(tmp_path / "sweep.jsonl")], timeout=280)
    assert first["best"]["fits"] and len(first["tried"]) == 1
    assert len(again["tried"]) == 2 and first["tried"][0] in again["tried"]
    estimates = [row["estimated_step_s"] for row in again["tried"]]
    assert estimates == sorted(estimates) and again["best"] == again["tried"][0]
    assert again["candidates"] > 4
    assert all(one.partition("=")[0] in ("mesh", "microbatches", "model.remat") for one in first["best"]["set"])


REFUSED = {
    "--topology v6e:3x3": ["no TPU topology 'v6e:3x3'", "v6e:4x4"],
    "--topology v6e:2x2 --set model.remat=everythin": ["remat", "no preset 'everythin'", "did you mean 'everything'"],
    "--topology v6e:2x2 --set input.batch_size=6": ["input.batch_size: expected a multiple of 4", "got 6"],
    "--topology v6e:2x2 --set input.seq_len=8192": [
        "input.seq_len is 8192", "model.block.attention.rope.max_length is 4096",
    ],
    "--topology v6e:2x2 --set mesh={'fsdp':3}": ["mesh fsdp 3 needs 3 devices but there are 4"],
    "--topology v6e:2x2 --slices 2 --set mesh={'data':4,'fsdp':2} --set slices={'fsdp':4}": [
        "slices fsdp 4 is for 4 slices but there are 2",
    ],
    "--topology v6e:2x2 --slices 2 --set mesh={'data':1,'fsdp':8} --set slices={'data':2}": [
        "mesh axis 'data' has size 1, no multiple of slices.data=2",
    ],
    "--topology v6e:2x2 --slices 2 --set slices={'dat':2}": ["slices has no axis 'dat'", "did you mean 'data'"],
    "--topology v6e:2x2 --set model.block.attention.num_kv_heads=2 --set mesh={'tensor':4}": [
        "num_kv_heads=2", "tensor 4",
    ],
    "--topology v6e:2x2 --apply low_rnk": ["no modifier 'low_rnk'", "did you mean 'low_rank'"],
    "--topology v6e:2x2 --step decode": ["--step decode", "known: eval, train"],
    "--topology v6e:2x2 --set model.num_layer=2": ["num_layer", "num_layers"],
    "--topology v6e:2x2 --set compiler_options={'xla_no_such':'1'}": ["No such compile option: 'xla_no_such'"],
    "--topology v6e:2x2 --sweep --step eval": ["--sweep searches for a train step"],
}  # fmt: skip


@needs_compiler
def test_what_cannot_be_is_refused_before_compiling():
    found = elsewhere(refuse, list(REFUSED))
    for words, expected in REFUSED.items():
        status, message = found[words]
        assert status == 2 and all(part in message for part in expected), (words, message)


def run_cli(words: list[str]) -> dict[str, Any]:
    """The JSON object that the command line prints last."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["aot", *words]) == 0
    return {"json": json.loads(out.getvalue().splitlines()[-1])}


def run_twice(words: list[str]) -> list[dict[str, Any]]:
    return [run_cli(words)["json"] for _ in range(2)]


def refuse(lines: list[str]) -> dict[str, tuple[int, str]]:
    """Exit status and message by command line."""
    messages = {}
    for line in lines:
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            status = cli.main(["aot", HERE, *line.split()])
        messages[line] = status, err.getvalue()
    return messages


def test_the_topology_is_checked_without_jax(capsys):
    assert cli.main(["aot", "demo_sft", "--topology", "v5p:9x9x9"]) == 2
    assert "the nearest: v5p:" in capsys.readouterr().err
    assert parse_topology("v5p:8x8x8").devices == 512


def test_the_table_says_which_loops_were_guessed():
    report: dict[str, Any] = dict.fromkeys(("step", "topology", "sold_as", "flops_of"), "-")
    report |= dict.fromkeys(("slices", "devices", "compile_s", "compile_cpu_s", "host_rss", "exposed_s"), 1)
    report |= dict.fromkeys(("flops_analytic", "flops_executed", "estimated_step_s", "mfu_estimate"), 1.0)
    report |= {"mesh": {}, "hbm": None, "oom": {"message": "-"}}
    report |= {"roofline_s": {}, "collectives": {}, "largest_buffers": []}
    for count, said in ((0, False), (2, True)):
        console = Console(file=io.StringIO(), width=200)
        print_report({**report, "unknown_loops": count}, console=console)
        assert isinstance(console.file, io.StringIO)
        assert ("2 loops of unknown length count once" in console.file.getvalue()) is said
