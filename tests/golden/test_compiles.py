"""Texts to be compared: what they say of a program, and what they leave out."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mesh import UserError, make_mesh
from tests.golden.compiles import CASES, chosen, golden_lines, stored_versions
from tools.aot.report import arguments

REPLICATED = P()


def test_arguments_are_listed_with_the_axes_that_shard_them():
    mesh = make_mesh({}, jax.devices()[:1])

    def described(*shape: int, spec: P = REPLICATED, kind: str | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec, memory_kind=kind))

    state = {
        "head": described(8, 16, spec=P("fsdp", ("sequence", "tensor"))),
        "mu": [described(8, 16, spec=P("fsdp"), kind="pinned_host"), described()],
    }
    with jax.set_mesh(mesh):
        traced = jax.jit(lambda state, batch: (state, batch)).trace(state, batch=described(4, 4, spec=P(None, "data")))
    assert list(map(str, arguments(traced.jaxpr))) == [
        "state.head: bfloat16[8,16] sharded over (fsdp, sequence+tensor)",
        "state.mu.0: bfloat16[8,16] sharded over (fsdp, -) on the host",
        "state.mu.1: bfloat16[] on every device",
        "batch: bfloat16[4,4] sharded over (-, data)",
    ]


def report(**changes: Any) -> dict[str, Any]:
    hbm = {"arguments": 3 << 20, "output": 0, "alias": 0, "temp": 1 << 19, "host": 0, "peak": 4 << 20, "code": 7}
    gather, reduce = ({"count": count, "bytes": 5 << 18, "overlapped": 4} for count in (3, 7))
    rows = {"all-gather": gather, "all-reduce": reduce}
    large = {"bytes": 1 << 20, "array": "bf16[8]", "what": "backward", "path": "copy.12", "source": "layers.py:9"}
    facts = {"step": "train", "mesh": {"fsdp": 2, "tensor": 4}, "fits": True, "hbm": hbm, "oom": None}
    return {
        **facts, "kept_for_backward": 1 << 20, "flops_analytic": 2e12, "flops_executed": 3e12,
        "collectives": {"fsdp": rows}, "arguments": ["state.x: int32[] on every device"], "largest_buffers": [large],
        "compile_s": 1.0, **changes,
    }  # fmt: skip


def test_each_fact_has_a_line_that_can_be_read_alone():
    lines = golden_lines(report())
    for line in (
        "mesh: fsdp 2 x tensor 4",
        "memory temp: 0.50 MiB",
        "kept for the backward pass: 1.00 MiB",
        "FLOPs executed: 3e+12",
        "collective over fsdp, all-gather: 3 times, 1.25 MiB received",
        "collective over fsdp, all-reduce: 1.25 MiB received",
        "argument state.x: int32[] on every device",
        "large array: 1.00 MiB bf16[8] backward copy",
    ):
        assert line in lines
    assert len(lines) == len(set(lines))


def test_times_estimates_and_places_in_files_are_left_out():
    other = report(compile_s=9.0, estimated_step_s=1.0, host_rss=1)
    other["largest_buffers"] = [{**other["largest_buffers"][0], "source": "layers.py:10", "path": "copy.13"}]
    counts = {"all-gather": 3, "all-reduce": 5}
    rows = {kind: {"count": count, "bytes": 5 << 18, "overlapped": 0} for kind, count in counts.items()}
    other["collectives"] = {"fsdp": rows}
    assert golden_lines(other) == golden_lines(report())


def test_what_does_not_fit_says_what_it_needs():
    shortage = {"what": "HLO temporaries", "needed": 3 << 30}
    lines = golden_lines(report(fits=False, hbm=None, collectives=None, oom=shortage))
    assert "fits: no" in lines and "memory: HLO temporaries need 3,072.00 MiB" in lines


def test_cases_are_chosen_by_experiment_or_file():
    assert {case.small for case in chosen([], full=False)} == {True}
    assert chosen([], full=True) == list(CASES)
    assert [case.name for case in chosen(["llama2_7b"], full=False)] == ["llama2_7b.v5p-32.small"]
    assert [case.name for case in chosen(["llama2_7b.v5p-32.txt"], full=False)] == ["llama2_7b.v5p-32"]
    with pytest.raises(UserError, match="no experiment or file 'lama2_7b' to compile; did you mean 'llama2_7b'"):
        chosen(["lama2_7b"], full=False)
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_versions_are_read_from_a_text():
    assert stored_versions("axl aot x\ncompiled by libtpu 1, jax 2\nstep: train\n") == "compiled by libtpu 1, jax 2"
    assert stored_versions("step: train\n") == "of unknown versions"
