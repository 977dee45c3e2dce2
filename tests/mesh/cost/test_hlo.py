"""The text of optimised programs: shapes with tiles, loops, fusions, sources."""

from pathlib import Path

import pytest

from mesh.cost.buffers import argument_path, largest_buffers, phase
from mesh.cost.collectives import by_axis, collectives
from mesh.cost.hlo import Array, parse
from mesh.cost.traffic import operations
from tests.mesh.described import described_mesh

# As libtpu writes it, shortened: a loop of 4 turns around an all-gather and a fused reduce-scatter, and what is around.
PROGRAM = (Path(__file__).parent / "small_program.hlo").read_text()


def test_an_array_counts_with_the_padding_of_its_tiles():
    assert Array("bf16", (2, 2048, 512), "2,1,0:T(8,128)(2,1)").padded == 2 * 2048 * 512 * 2
    assert Array("f32", (5, 100), "1,0:T(8,128)").padded == 8 * 128 * 4
    assert Array("f32", (100, 5), "0,1:T(8,128)").padded == 128 * 8 * 4  # 100 is the minor-most here
    assert Array("f32", (), "").bytes == 4
    assert Array("s4", (3,), "").bytes == 2
    assert not Array("f32", (8,), "0:T(128)S(1)").in_hbm


def test_loops_turn_as_often_as_their_condition_says():
    program = parse(PROGRAM)
    weights = {name: times for name, times, _ in program.weighted()}
    assert weights["body"] == 4 and weights["main"] == 1 and weights["all-reduce-scatter.1"] == 4
    assert program.unknown_loops() == 0
    other = parse(PROGRAM.replace("constant(4)", "constant(11)"))
    assert {name: times for name, times, _ in other.weighted()}["body"] == 11
    endless = parse(PROGRAM.replace("direction=LT", "direction=NE"))
    assert endless.unknown_loops() == 1
    said = parse(PROGRAM.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"6"}}'))
    assert {name: times for name, times, _ in said.weighted()}["body"] == 6


def test_collectives_by_axis_kind_and_bytes():
    """Counts made by hand: 4 turns; bf16 of 2 bytes; groups of 2: half is received, in an all-reduce all."""
    mesh = described_mesh(fsdp=2, tensor=2)  # devices 0 and 1 differ in tensor, 0 and 2 in fsdp
    found = collectives(parse(PROGRAM), mesh)
    table = by_axis(found, [0.5] * len(found))
    assert table == {
        "fsdp": {
            "all-gather": {"count": 4, "bytes": 4 * 64 * 256 * 2 // 2, "overlapped": 2 * 64 * 256 * 2 // 2},
            "reduce-scatter": {"count": 4, "bytes": 4 * 64 * 128 * 2 // 2, "overlapped": 2 * 64 * 128 * 2 // 2},
        },
        "tensor": {"collective-permute": {"count": 1, "bytes": 64 * 128 * 2, "overlapped": 64 * 128}},
        "fsdp+tensor": {"all-reduce": {"count": 1, "bytes": 36 * 2 * 3 // 4, "overlapped": 27}},
    }
    permute = next(one for one in found if one.kind == "collective-permute")
    assert permute.beside == 700  # what stands between its start and its end
    assert sum(one.beside for one in found) == 700


# As libtpu writes it, shortened: two collectives that the SparseCore runs, of which the second begins within the first.
OFFLOADED = """HloModule step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%gather (part: bf16[16,256]) -> bf16[64,256] {
  %part = bf16[16,256]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[64,256]{1,0} all-gather(%part), replica_groups=mesh['axis_0'=4] {'axis_0'}, dimensions={0}
}, execution_thread="sparsecore"

%scatter (all: f32[64,256]) -> f32[16,256] {
  %all = f32[64,256]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = f32[16,256]{1,0} reduce-scatter(%all), replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[16,256], g: f32[64,256]) -> (bf16[64,256], f32[16,256]) {
  %x = bf16[16,256]{1,0} parameter(0)
  %g = f32[64,256]{1,0} parameter(1)
  %g.start = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%gather
  %s.start = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%scatter
  %zero = f32[64,256]{1,0} copy(%g), backend_config={"window_config":{"estimated_cycles":"9000"}}
  %g.update = ((bf16[16,256]{1,0}), bf16[64,256]{1,0}) call-update(%g.start, %x)
  %one = f32[64,256]{1,0} copy(%g), backend_config={"window_config":{"estimated_cycles":"100"}}
  %s.update = ((f32[64,256]{1,0}), f32[16,256]{1,0}) call-update(%s.start, %one)
  %two = f32[64,256]{1,0} copy(%g), backend_config={"window_config":{"estimated_cycles":"40"}}
  %g.done = bf16[64,256]{1,0} call-done(%g.update)
  %three = f32[64,256]{1,0} copy(%g), backend_config={"window_config":{"estimated_cycles":"8"}}
  %s.done = f32[16,256]{1,0} call-done(%s.update)
  ROOT %both = (bf16[64,256]{1,0}, f32[16,256]{1,0}) tuple(%g.done, %s.done)
}
"""


def test_collectives_of_the_sparse_core_run_beside_what_stands_between_update_and_done():
    program = parse(OFFLOADED)
    found = {one.kind: one for one in collectives(program, described_mesh(fsdp=4))}
    gather, scatter = found["all-gather"], found["reduce-scatter"]
    assert (gather.axis, gather.bytes, gather.beside) == ("fsdp", 64 * 256 * 2 * 3 // 4, 100 + 20)  # 40 are of both
    assert (scatter.axis, scatter.bytes, scatter.beside) == ("fsdp", 64 * 256 * 4 * 3 // 4, 20 + 8)
    assert sum(one.times for one in operations(program)) == 4  # no transfer is an operation of the device's
    without = parse(OFFLOADED.replace("call-done(%g.update)", "get-tuple-element(%g.update), index=1"))
    waited_for_later = {one.kind: one.beside for one in collectives(without, described_mesh(fsdp=4))}
    assert waited_for_later == {"all-gather": 100 + 20 + 4, "reduce-scatter": 20 + 4}


def test_rows_to_experts_count_as_many_as_there_are():
    """128 rows of 4 bf16 go to 4 devices, each of which has places for all of them from everybody; and back."""
    sizes = "%size, %size, %size, %size), channel_id=3, replica_groups={{0,1,2,3}}"
    text = f"""HloModule step, is_scheduled=true, num_partitions=4

ENTRY %main (rows: bf16[128,4], places: bf16[512,4]) -> bf16[128,4] {{
  %rows = bf16[128,4]{{1,0}} parameter(0)
  %places = bf16[512,4]{{1,0}} parameter(1)
  %size = s32[4]{{0}} constant(0)
  %there = bf16[512,4]{{1,0}} ragged-all-to-all(%rows, %places, {sizes}
  ROOT %back = bf16[128,4]{{1,0}} ragged-all-to-all(%there, %rows, {sizes}
}}
"""
    found = collectives(parse(text), described_mesh(fsdp=2, tensor=2))
    assert [(one.kind, one.bytes) for one in found] == [("all-to-all", 128 * 4 * 2 * 3 // 4)] * 2


def test_what_is_cut_out_of_a_stack_counts_as_what_is_cut_out():
    moved = {one.cycles: one for one in operations(parse(PROGRAM))}
    assert moved[100].bytes == 2 * 64 * 128 * 2 + 4  # read and written, and the index; not the stack
    assert moved[100].times == 4


def test_what_is_cut_out_in_a_fusion_within_a_fusion_counts_as_what_is_cut_out():
    """A layer's matrix of a stack of 64, sliced in a fusion that is in the fusion of its product."""
    text = """HloModule step, is_scheduled=true

%slice (stack: bf16[64,128,256], layer: s32[]) -> bf16[128,256] {
  %stack = bf16[64,128,256]{2,1,0} parameter(0)
  %layer = s32[] parameter(1)
  %cut = bf16[1,128,256]{2,1,0} dynamic-slice(%stack, %layer), dynamic_slice_sizes={1,128,256}
  ROOT %matrix = bf16[128,256]{1,0} bitcast(%cut)
}

%product (x: bf16[16,128], stack.1: bf16[64,128,256], layer.1: s32[]) -> bf16[16,256] {
  %x = bf16[16,128]{1,0} parameter(0)
  %stack.1 = bf16[64,128,256]{2,1,0} parameter(1)
  %layer.1 = s32[] parameter(2)
  %sliced = bf16[128,256]{1,0} fusion(%stack.1, %layer.1), kind=kLoop, calls=%slice
  ROOT %y = bf16[16,256]{1,0} convolution(%x, %sliced), dim_labels=bf_io->bf
}

ENTRY %main (x.1: bf16[16,128], stack.2: bf16[64,128,256], layer.2: s32[]) -> bf16[16,256] {
  %x.1 = bf16[16,128]{1,0} parameter(0)
  %stack.2 = bf16[64,128,256]{2,1,0} parameter(1)
  %layer.2 = s32[] parameter(2)
  ROOT %done = bf16[16,256]{1,0} fusion(%x.1, %stack.2, %layer.2), kind=kOutput, calls=%product
}
"""
    (product,) = operations(parse(text))
    assert product.matrix and product.bytes == 2 * (16 * 128 + 128 * 256 + 16 * 256) + 4
    whole = text.replace("fusion(%stack.1, %layer.1), kind=kLoop, calls=%slice", "reshape(%stack.1)")
    (product,) = operations(parse(whole))
    assert product.bytes == 2 * (16 * 128 + 64 * 128 * 256 + 16 * 256) + 4


def test_what_is_cut_out_of_other_tiles_of_a_stack_counts_as_what_is_cut_out():
    """The compiler for tpu7x makes such programs: a fusion reads the stack by tiles of 8 rows, not 16, in place."""
    text = """HloModule step, is_scheduled=true

%tiles (input: bf16[64,128,256]) -> bf16[64,128,256] {
  %input = bf16[64,128,256]{2,1,0:T(16,128)(2,1)} parameter(0)
  ROOT %copied = bf16[64,128,256]{2,1,0:T(8,128)(2,1)} copy(%input)
}

%slice (stack: bf16[64,128,256], layer: s32[]) -> bf16[128,256] {
  %stack = bf16[64,128,256]{2,1,0:T(16,128)(2,1)} parameter(0)
  %tiled = bf16[64,128,256]{2,1,0:T(8,128)(2,1)} fusion(%stack), kind=kLoop,
    output_to_operand_aliasing={{}: (0, {})}, calls=%tiles
  %layer = s32[] parameter(1)
  %cut = bf16[1,128,256]{2,1,0:T(8,128)(2,1)} dynamic-slice(%tiled, %layer), dynamic_slice_sizes={1,128,256}
  ROOT %matrix = bf16[128,256]{1,0:T(8,128)(2,1)} bitcast(%cut)
}

%product (x: bf16[16,128], stack.1: bf16[64,128,256], layer.1: s32[]) -> bf16[16,256] {
  %x = bf16[16,128]{1,0} parameter(0)
  %stack.1 = bf16[64,128,256]{2,1,0:T(16,128)(2,1)} parameter(1)
  %layer.1 = s32[] parameter(2)
  %sliced = bf16[128,256]{1,0:T(8,128)(2,1)} fusion(%stack.1, %layer.1), kind=kLoop, calls=%slice
  ROOT %y = bf16[16,256]{1,0} convolution(%x, %sliced), dim_labels=bf_io->bf
}

ENTRY %main (x.1: bf16[16,128], stack.2: bf16[64,128,256], layer.2: s32[]) -> bf16[16,256] {
  %x.1 = bf16[16,128]{1,0} parameter(0)
  %stack.2 = bf16[64,128,256]{2,1,0:T(16,128)(2,1)} parameter(1)
  %layer.2 = s32[] parameter(2)
  ROOT %done = bf16[16,256]{1,0} fusion(%x.1, %stack.2, %layer.2), kind=kOutput, calls=%product
}
"""
    (product,) = operations(parse(text))
    assert product.matrix and product.bytes == 2 * (16 * 128 + 128 * 256 + 16 * 256) + 4
    (product,) = operations(parse(text.replace("output_to_operand_aliasing={{}: (0, {})}, ", "")))
    assert product.bytes == 2 * (16 * 128 + 64 * 128 * 256 + 16 * 256) + 4


def test_what_is_under_way_beside_others_counts_once():
    """A slice into another memory is read; a gather is read and written; a copy has its own line for both."""
    text = """HloModule step, is_scheduled=true

ENTRY %main (stack: bf16[64,128]) -> bf16[32,128] {
  %stack = bf16[64,128]{1,0} parameter(0)
  %slice-start = ((bf16[64,128]{1,0}), bf16[16,128]{1,0:S(1)}, s32[]) slice-start(%stack), slice={[0:16], [0:128]}
  %slice-done = bf16[16,128]{1,0:S(1)} slice-done(%slice-start)
  %call-start = ((bf16[64,128]{1,0}), bf16[32,128]{1,0}, s32[]) call-start(%stack), to_apply=%gather
  %call-update = ((bf16[64,128]{1,0}), bf16[32,128]{1,0}, s32[]) call-update(%call-start)
  ROOT %call-done = bf16[32,128]{1,0} call-done(%call-update)
}
"""
    assert [one.bytes for one in operations(parse(text))] == [16 * 128 * 2, 2 * 32 * 128 * 2]


def test_the_largest_arrays_carry_layer_and_pass():
    largest = largest_buffers(parse(PROGRAM))
    assert largest[0].what == "argument" and largest[0].path == "state.params.layers.mu.up_df"
    assert largest[0].bytes == 4 * 64 * 128 * 2
    gathered = next(one for one in largest if one.array == "bf16[64,256]")
    assert (gathered.path, gathered.source) == ("Decoder.hidden/Attention", "attention.py:33")
    assert (gathered.what, gathered.operation) == ("forward", "dot_general")


def test_passes_and_paths_are_told_from_names():
    assert phase("jit(step)/transpose(jvp())/checkpoint/rematted_computation/dot") == "recomputed"
    assert phase("jit(step)/transpose(jvp())/dot") == "backward"
    assert phase("jit(step)/mul") == "other"
    assert argument_path("batch['tokens']") == "batch.tokens"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{}", "fsdp+tensor"),
        ("[1,4]<=[4]", "fsdp+tensor"),
        ("[2,2]<=[4]", "tensor"),
        ("{{0,2},{1,3}}", "fsdp"),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_1'}", "tensor"),
        ("mesh['a'=4] {'a':(1)2}", "fsdp"),
        ("mesh['a'=4] {'a':(2)2}", "tensor"),
    ],
)
def test_every_way_to_write_groups(groups, axes):
    text = PROGRAM.replace("replica_groups={{0,2},{1,3}}", f"replica_groups={groups}")
    found = collectives(parse(text), described_mesh(fsdp=2, tensor=2))
    assert next(one for one in found if one.kind == "reduce-scatter").axis == axes


def test_an_instruction_may_go_over_several_lines():
    wanted = parse(PROGRAM)
    split = PROGRAM.replace("kind=kCustom, ", 'kind=kCustom, backend_config={"debug":"\n{\n}}", ')
    assert list(split.splitlines()) != list(PROGRAM.splitlines())
    found = parse(split)
    assert {n: len(lines) for n, lines in found.computations.items()} == {
        n: len(lines) for n, lines in wanted.computations.items()
    }
    scattered = next(one for one in found.computations["body"] if one.name == "scattered")
    assert scattered.called == {"calls": "all-reduce-scatter.1"} and scattered.frame == 3


def test_offloaded_activations_count_as_one_layer_of_the_hosts_stack():
    """A layer's activations go to the stack of all layers in the host's memory, and one comes back: 1 of 32 layers."""
    host, layer = "bf16[32,64,128]{2,1,0:T(8,128)(2,1)S(5)}", "bf16[1,64,128]{2,1,0:T(8,128)(2,1)}"
    text = f"""HloModule step, is_scheduled=true

ENTRY %main (stack: bf16[32,64,128], one: bf16[1,64,128], at: s32[]) -> bf16[1,64,128] {{
  %stack = {host} parameter(0)
  %one = {layer} parameter(1)
  %at = s32[] parameter(2)
  %out = (({host}, {layer}, s32[]), {host}, u32[]) dynamic-update-slice-start(%stack, %one, %at, %at, %at)
  %kept = {host} dynamic-update-slice-done(%out)
  %in = (({host}, s32[]), {layer}, u32[]) dynamic-slice-start(%kept, %at, %at, %at), dynamic_slice_sizes={{1,64,128}}
  ROOT %back = {layer} dynamic-slice-done(%in)
}}
"""
    size = 64 * 128 * 2
    assert [one.bytes for one in operations(parse(text))] == [size, size]  # read from HBM; written to it
    in_hbm = parse(text.replace("S(5)", ""))
    assert [one.bytes for one in operations(in_hbm)] == [2 * size, 2 * size]
