"""The text of optimised programs: shapes with tiles, loops, fusions, sources."""

import pytest

from mesh.buffers import argument_path, largest_buffers, phase
from mesh.collectives import by_axis, collectives
from mesh.hlo import Array, parse
from mesh.traffic import operations
from tests.mesh.described import described_mesh

# As libtpu writes it, shortened: a loop of 4 turns around an all-gather and a fused reduce-scatter, and what surrounds it.
PROGRAM = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

FileNames
1 "/src/axlearn_like/layers/decoder.py"
2 "/src/axlearn_like/layers/attention.py"

FunctionNames
1 "Decoder.hidden"
2 "Decoder.hidden.<locals>.apply"
3 "Attention.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=1 function_name_id=2 line=7 end_line=7 column=1 end_column=2}
3 {file_name_id=2 function_name_id=3 line=33 end_line=33 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (input: bf16[64,128]) -> bf16[32,128] {
  %input = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.9 = bf16[64,128]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=9, replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %part = bf16[32,128]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.9), dynamic_slice_sizes={32,128}
}

%fused_slice (stack: bf16[4,64,128], index: s32[]) -> bf16[1,64,128] {
  %stack = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %index = s32[]{:T(128)} parameter(1)
  ROOT %cut = bf16[1,64,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%stack, %index), dynamic_slice_sizes={1,64,128}
}

%condition (state: (s32[], bf16[4,64,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(4)
  %state = (s32[]{:T(128)}, bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%counter, %limit), direction=LT
}

%body (state.1: (s32[], bf16[4,64,128])) -> (s32[], bf16[4,64,128]) {
  %state.1 = (s32[]{:T(128)}, bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %counter.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %stack.1 = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state.1), index=1
  %layer = bf16[1,64,128]{2,1,0:T(8,128)(2,1)} fusion(%stack.1, %counter.1), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(step)/jvp()/while/body/dynamic_slice" stack_frame_id=3}, backend_config={"estimated_cycles":"100"}
  %all-gather.1 = bf16[64,256]{1,0:T(8,128)(2,1)} all-gather(%layer), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={1}, use_global_device_ids=true, metadata={op_name="jit(step)/jvp()/while/body/dot_general" stack_frame_id=3}
  %scattered = bf16[32,128]{1,0:T(8,128)(2,1)} fusion(%layer), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(step)/transpose(jvp())/while/body/dot_general" stack_frame_id=3}
  ROOT %next = (s32[]{:T(128)}, bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) tuple(%counter.1, %stack.1)
}

ENTRY %main (argument: bf16[4,64,128]) -> f32[] {
  %argument = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="state[\\'params\\'][\\'layers\\'].mu[\\'up_df\\']"}
  %zero = s32[]{:T(128)} constant(0)
  %begin = s32[]{:T(128)} copy(%zero)
  %started = (bf16[64,128]{1,0:T(8,128)(2,1)}, bf16[64,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%argument), channel_id=3, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %tuple.1 = (s32[]{:T(128)}, bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) tuple(%begin, %argument)
  %busy = f32[100]{0:T(128)} fusion(%argument), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(step)/mul"}, backend_config={"estimated_cycles":"700"}
  %finished = bf16[64,128]{1,0:T(8,128)(2,1)} collective-permute-done(%started)
  %loop = (s32[]{:T(128)}, bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) while(%tuple.1), condition=%condition, body=%body
  %all-reduce.2 = (f32[8]{0:T(128)}, f32[]{:T(128)}) all-reduce(%busy, %busy), channel_id=4, replica_groups=mesh['pipeline'=1,'fsdp'=2,'tensor'=2] {'fsdp','tensor'}, to_apply=%add
  %alone = f32[8]{0:T(128)} all-reduce(%busy), channel_id=5, replica_groups={{0},{1},{2},{3}}, to_apply=%add
  ROOT %result = f32[]{:T(128)} get-tuple-element(%all-reduce.2), index=1
}
"""


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
    """By hand: 4 turns; bf16 of 2 bytes; groups of 2, so that a half or, in an all-reduce, twice that is received."""
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


def test_what_is_cut_out_of_a_stack_counts_as_what_is_cut_out():
    moved = {one.cycles: one for one in operations(parse(PROGRAM))}
    assert moved[100].bytes == 2 * 64 * 128 * 2 + 4  # read and written, and the index; not the stack
    assert moved[100].times == 4


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
