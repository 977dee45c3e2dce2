"""The TPU compiler accepts the engine's steps, which update the cache in place and fit (docs/concepts/tpu-rollout.md).

The compiler runs in processes of its own: it writes to standard error at its start, and it can end a process.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.wrappers.low_rank.factorised import FactorisedWeights
from axlearn_like.layers.wrappers.quantised import StoredWeights
from mesh import UserError, make_mesh
from mesh.cost.ahead_of_time import memory_per_device
from mesh.topology import find_compiler, parse_topology, topology_devices
from models.dense import dense
from models.gemma import gemma2
from models.gpt_oss import sink_mixture
from models.moe import moe
from models.qwen import qwen
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.dispatches import engine_dispatches
from rl.rollout.model_runner.weights import place
from rl.rollout.speculation.speculator import Speculation
from tests.elsewhere import elsewhere
from tests.rl.rollout.model_runner.compiled_engine import compile_engine, largest_pool
from tests.tpu_compiler import TPU_COMPILER

COMPILER = find_compiler() is not None
needs_compiler = pytest.mark.skipif(not COMPILER, reason="the TPU compiler (libtpu, extra `aot`) is not installed")


def small_engine(**changes: Any) -> RolloutEngine.Config:
    """Two layers of the kind of QwQ-32B's: eight key/value heads, biases, a head that is not the embedding."""
    model = dense(
        vocab_size=1024, dim=256, hidden=512, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=128,
        theta=1e6, eps=1e-5, qkv_bias=True, tied=False,
    )  # fmt: skip
    cfg = RolloutEngine.Config(
        model=model.clone(dtype="bfloat16"),
        stop_tokens=(1,),
        max_prompt_tokens=256,
        max_new_tokens=256,
        prefill_tokens=64,
        max_num_seqs=16,
    )
    return cfg.clone(pages=4096).clone(**changes)


def patterned_engine() -> RolloutEngine.Config:
    """Two rounds of blocks with and without a window, and a rest of one."""
    shape = {"vocab_size": 512, "dim": 256, "hidden": 256, "num_layers": 5, "heads": (8, 4, 128)}
    return small_engine(model=gemma2(window=64, scalar=128, **shape).set(dtype="bfloat16"), pages=1024)


def compile_patterned(topology: str) -> list[dict[str, Any]]:
    steps = compile_engine(patterned_engine(), topology, only=("prefill", "decode"))
    return [{"aliased": step.aliased, "pool": step.pool, "temporary": step.temporary} for step in steps]


@needs_compiler
@pytest.mark.full
def test_a_pattern_of_windows_compiles_without_a_copy_of_the_cache():
    for step in elsewhere(compile_patterned, "v5e:2x2"):
        assert step["aliased"] == step["pool"] and step["temporary"] < 0.2 * step["pool"], step


def compile_mixture(topology: str) -> dict[str, Any]:
    """A mixture whose experts have a width of 192 on each of four devices, which a device would hold as 256."""
    cfg = small_engine(mesh={"tensor": 4})
    experts = Experts.Config(hidden=768)
    mixture = MoE.Config(num_experts=32, router=SoftmaxRouter.Config(top_k=4), experts=experts)
    model: Any = cfg.model.set(dim=1024)
    model.block = model.block.clone(feed_forward=mixture)
    (step, _) = compile_engine(cfg.clone(model=model), topology, only=("decode",))
    return dataclasses.asdict(step)


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_experts_are_read_where_they_are_and_copied_nowhere(topology: str):
    """16 rows of 4 experts choose all 32 at the most: a step reads all weights but the embedding, and 16 x 512 keys."""
    step = elsewhere(compile_mixture, topology)
    read = step["weights"] - 1024 * 1024 * 2 // 4 + 2 * 2 * 16 * 512 * 2 * 128 * 2
    assert 0.95 < step["moved"] / 32 / read < 1.1, step
    assert step["temporary"] < 0.05 * step["weights"], step


def compile_dense(topology: str) -> list[dict[str, Any]]:
    cfg = small_engine(pages=64, mesh={"tensor": 8})
    model: Any = cfg.model.set(dim=2048, num_layers=16)
    model.block.feed_forward = SwiGLU.Config(hidden=16_384)
    steps = compile_engine(cfg.clone(model=model), topology, only=("decode",))
    return [dataclasses.asdict(step) for step in steps]


@needs_compiler
@pytest.mark.full
def test_no_matrix_is_copied_into_other_tiles_on_tpu7x():
    """Left to itself the compiler copies the stacks of feed-forward matrices, most of the weights, once a dispatch."""
    for step in elsewhere(compile_dense, "tpu7x:2x2x1"):
        assert step["temporary"] < 0.2 * step["weights"], step


def compile_int8_cache(topology: str) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for dtype in (None, "int8"):
        cfg = small_engine(page_size=64, pages=1024, kv_cache_dtype=dtype, speculation=Speculation.Config())
        found[str(dtype)] = [dataclasses.asdict(step) for step in compile_engine(cfg, topology)]
    return found


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_int8_keys_and_values_halve_the_pages_that_all_programs_update_in_place(topology: str):
    found = elsewhere(compile_int8_cache, topology)
    for plain, rounded in zip(found["None"], found["int8"], strict=True):
        assert rounded["pool"] == plain["pool"] * (128 + 4) / 256, rounded["name"]
        assert rounded["aliased"] == rounded["pool"], rounded["name"]
        assert rounded["temporary"] < 0.1 * rounded["pool"], rounded["name"]
        saved = plain["arguments"] - rounded["arguments"]  # what the compiler counts, padding included
        assert saved == plain["pool"] - rounded["pool"], rounded["name"]


def refusal_of_int8(topology: str) -> list[str]:
    found = []
    for changes in ({"page_size": 16}, {"page_size": 64, "cascade": 4}):
        try:
            engine_dispatches(
                small_engine(kv_cache_dtype="int8", **changes), topology_devices(parse_topology(topology))
            )
        except UserError as error:
            found.append(str(error))
    return found


@needs_compiler
def test_short_pages_and_shared_keys_are_refused_with_int8_keys_and_values():
    pages, cascade = elsewhere(refusal_of_int8, "v5e:2x2")
    assert "page_size: expected 64 on TPUs with kv_cache_dtype='int8'" in pages
    assert "cascade: expected None on TPUs with kv_cache_dtype='int8'" in cascade


def refusal_of_sinks(topology: str) -> str:
    cfg = sink_mixture(
        vocab_size=512, dim=256, hidden=64, num_layers=3, heads=(8, 4, 128), num_experts=4, top_k=2, rope=Rope.Config()
    )
    try:
        engine_dispatches(small_engine(model=cfg), topology_devices(parse_topology(topology)))
    except UserError as error:
        return str(error)
    return "not refused"


@needs_compiler
def test_sinks_in_a_pattern_are_refused_by_name():
    assert "Attention.sinks: the TPU kernel" in elsewhere(refusal_of_sinks, "v5e:2x2")


def qwq_engine(**changes: Any) -> RolloutEngine.Config:
    cfg = RolloutEngine.Config(
        model=qwen("QwQ-32B"), stop_tokens=(151_645,), max_prompt_tokens=4096, max_new_tokens=12_288
    )
    return cfg.clone(**changes)


@pytest.mark.numerics
@needs_compiler
@pytest.mark.parametrize("topology", ["v5p:2x2x1", pytest.param("v6e:2x2", marks=pytest.mark.full)])
def test_all_programs_compile_and_none_copies_the_cache(topology):
    found = elsewhere(compile_small, topology)
    names = [step["name"] for step in found["steps"]]
    assert names == ["prefill 2 x 32", "decode 16, plain", "decode 16, all rules", "copy pages", "zero pages"]
    devices, head = 4, 2 * 128 * 2  # one head's keys and values of a token, in bfloat16
    assert found["steps"][0]["pool"] == 2 * 4096 * 16 * 8 * head // devices
    for step in found["steps"]:
        assert step["aliased"] == step["pool"], step
        assert step["temporary"] < 0.1 * step["pool"], step
        assert step["tokens"] == 65_536
    decoding = found["steps"][1]  # the programs have the weights that we count, and no others
    assert decoding["arguments"] == pytest.approx(decoding["weights"] + decoding["pool"], rel=0.01)
    # Each of 32 steps reads all weights but the embedding, and keys and values of 16 sequences of 1,024 tokens.
    read = decoding["weights"] - 1024 * 256 * 2 // devices + 2 * 16 * 1024 * 8 * head // devices
    assert 1.0 < decoding["moved"] / 32 / read < 1.05


@pytest.mark.full
@needs_compiler
def test_held_weights_are_read_as_they_are_held():
    """Half the arguments; products take int8 numbers from their stack: a copy on the way moves as much as bfloat16."""
    plain, held = elsewhere(compile_held, "v6e:1x1")
    assert held["arguments"] - held["pool"] < 0.55 * (plain["arguments"] - plain["pool"])
    assert held["moved"] < 0.85 * plain["moved"] and held["temporary"] <= plain["temporary"]


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("topology", ["v6e:2x2", "v5p:2x2x1"])
def test_experts_of_int8_are_read_in_their_stack(topology: str):
    """No temporary memory as large as a layer's experts; in smaller models XLA's own product copies none either."""
    found = elsewhere(compile_held_experts, topology)
    assert found["step"]["temporary"] < found["layer"], found


@pytest.mark.full
@needs_compiler
def test_what_cannot_be_compiled_is_refused():
    found = elsewhere(refusals)
    assert "v5p" in found["topology"] and "v9:2x2" in found["topology"]
    assert "RolloutEngine.mesh tensor 2 needs 2 devices but there are 4: an engine has all devices" in found["mesh"]
    assert "would fit" not in found["mesh"]
    assert "all devices of an engine have all rows" in found["axis"]
    assert "copy pages does not fit v6e:2x2: weights of 0.00 GiB and pages of 305.18 GiB per device" in found["pool"]
    assert "31.24" in found["pool"]  # in the compiler's own words
    assert "v6e:2x2 has room for 0 pages of 16 tokens" in found["room"]
    assert "a sequence of RolloutEngine.max_prompt_tokens + max_new_tokens tokens needs 33" in found["room"]


@pytest.mark.full
@pytest.mark.timeout(1200)
@needs_compiler
@pytest.mark.parametrize(("topology", "least_tokens"), [("v5p:2x2x1", 1_000_000), ("v6e:2x4", 500_000)])
def test_a_policy_of_32_billion_parameters_fits(checkout, topology, least_tokens):
    """The largest cache that leaves room for a second version of the weights fits; a larger one does not."""
    found = elsewhere(compile_qwq, topology, timeout=1000)
    steps = found["steps"]
    assert len(steps) == 7
    for step in steps:
        assert step["aliased"] == step["pool"], step
        assert step["temporary"] < 0.05 * step["pool"], step
        assert 2 * step["weights"] + step["pool"] + step["temporary"] + step["code"] <= found["memory"], step
        assert step["tokens"] == found["tokens"] >= least_tokens
    plain = next(step for step in steps if step["name"] == "decode 64, plain")
    assert plain["temporary"] < 0.02 * plain["weights"]  # no weight is copied to another layout
    assert "does not fit" in found["too_large"]


def test_weights_are_sharded_before_their_heads_are_merged():
    found = elsewhere(merge_on_two_devices, environ={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})
    assert found == {"same": True, "shards": [[2, 3, 10], [2, 3, 10]], "dtype": "bfloat16"}


def compile_small(topology: str) -> dict[str, Any]:
    return {"steps": described(compile_engine(small_engine(max_new_tokens=768), topology))}


def compile_held(topology: str) -> list[dict[str, Any]]:
    shape: dict[str, Any] = {"vocab_size": 1024, "dim": 512, "hidden": 8192, "num_layers": 2, "num_heads": 16}
    model = dense(**shape, num_kv_heads=8, head_dim=128, theta=1e6, eps=1e-5, qkv_bias=True, tied=False)
    cfg = small_engine(pages=64, model=model.set(dtype="bfloat16"))
    ways = (None, StoredWeights.Config(vocabulary="int8"))
    return [described(compile_engine(cfg.clone(weights=way), topology, only=("decode",)))[0] for way in ways]


def compile_held_experts(topology: str) -> dict[str, Any]:
    """Decoding of Qwen3-30B-A3B with its experts as int8, and the bytes that a device has of a layer's."""
    shape: dict[str, Any] = {"max_prompt_tokens": 1024, "max_new_tokens": 1024, "max_num_seqs": 64, "pages": 256}
    cfg = RolloutEngine.Config(model=moe("Qwen3-30B-A3B"), stop_tokens=(0,), **shape)
    steps = compile_engine(cfg.clone(weights=StoredWeights.Config()), topology, only=("decode",))
    return {
        "step": described(steps)[0],
        "layer": 3 * 128 * 2048 * 768 // len(topology_devices(parse_topology(topology))),
    }


def refusals() -> dict[str, str]:
    """Messages by what is wrong."""
    asked = {
        "topology": lambda: compile_engine(small_engine(), "v9:2x2"),
        "mesh": lambda: compile_engine(small_engine(mesh={"tensor": 2}), "v5p:2x2x1"),
        "axis": lambda: compile_engine(small_engine(mesh={"data": 4}), "v5p:2x2x1"),
        "pool": lambda: compile_engine(small_engine(pages=10_000_000), "v6e:2x2", only=("copy",)),
        "room": lambda: largest_pool(small_engine(), "v6e:2x2", weights_held=100_000),
    }
    messages = {}
    for name, ask in asked.items():
        try:
            ask()
        except UserError as error:
            messages[name] = str(error)
    return messages


def compile_qwq(topology: str) -> dict[str, Any]:
    pages, memory = largest_pool(qwq_engine(), topology), memory_per_device(parse_topology(topology))
    steps = compile_engine(qwq_engine(pages=pages), topology)
    # The compiler counts one version of the weights, so its own bound is higher by one.
    more = pages + pages * (2 * steps[0].weights) // steps[0].pool
    try:
        compile_engine(qwq_engine(pages=more), topology, only=("decode",))
        too_large = "compiled"
    except UserError as error:
        too_large = str(error)
    return {"steps": described(steps), "memory": memory, "tokens": pages * 16, "too_large": too_large}


def described(steps: list[Any]) -> list[dict[str, Any]]:
    return [{name: getattr(step, name) for name in step.__slots__} for step in steps]


def merge_on_two_devices() -> dict[str, Any]:
    mesh = make_mesh({"tensor": 2})
    leaf = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)

    def like(*shape: int) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, jax.P(None, None, "tensor"))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    with jax.set_mesh(mesh):
        placed = place(leaf, like(2, 3, 4, 5), like(2, 3, 20))
    return {
        "same": bool((np.asarray(placed, np.float32) == leaf.reshape(2, 3, 20)).all()),
        "shards": [list(shard.data.shape) for shard in placed.addressable_shards],
        "dtype": str(placed.dtype),
    }


@pytest.mark.full
@needs_compiler
def test_prefill_with_factors_keeps_hidden_units_out_of_memory():
    """8,192 tokens, 14,336 hidden units, ranks of 256: on one chip, and with hidden units on four."""
    for topology in ("v6e:1x1", "v5e:2x2"):
        by_kernel, by_xla = (
            elsewhere(compile_factors, topology, kernel, environ=TPU_COMPILER) for kernel in (True, False)
        )
        assert by_kernel["kernels"] == by_xla["kernels"] + 1
        assert by_kernel["temporary"] < by_xla["temporary"]


def compile_factors(topology: str, kernel: bool) -> dict[str, int]:
    """Return the temporary memory of prefill, and how many kernels its program has."""
    shape: dict[str, Any] = {"vocab_size": 1024, "dim": 1024, "hidden": 14336, "num_layers": 2, "num_heads": 8}
    model = dense(**shape, num_kv_heads=8, head_dim=128, theta=1e6, eps=1e-5, qkv_bias=False, tied=True)
    factors = FactorisedWeights.Config(rank=256, layers=("feed_forward",), fused=kernel)
    cfg = small_engine(model=model.set(dtype="bfloat16"), weights=factors, prefill_tokens=8192, pages=1024)
    topology_ = parse_topology(topology)
    mesh, dispatches = engine_dispatches(cfg, topology_devices(topology_))
    prefill = next(one for one in dispatches if one.kind == "prefill")
    with jax.set_mesh(mesh):
        compiled = prefill.trace().lower().compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return {"temporary": memory.temp_size_in_bytes, "kernels": (compiled.as_text() or "").count('"tpu_custom_call"')}


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("topology", ["v6e:1x1", "v5e:2x2"])
def test_a_cache_in_rank_space_is_read_by_its_kernel(topology: str):
    """Eight heads of 128 as 64 + 64 numbers, padded to 128 + 128; on four chips each has the pages, and two heads."""
    held, plain = (elsewhere(compile_rank_cache, topology, one, environ=TPU_COMPILER) for one in (True, False))
    chips = 4 if topology == "v5e:2x2" else 1
    for kind in ("prefill", "decode"):
        assert held[kind]["kernels"] == plain[kind]["kernels"] > 0
        assert held[kind]["temporary"] <= 1.1 * plain[kind]["temporary"] + (1 << 20)
    assert plain["decode"]["pool"] == 8 // chips * held["decode"]["pool"]


def compile_rank_cache(topology: str, rank_cache: bool) -> dict[str, dict[str, int]]:
    """Return bytes of pages and of temporary memory of a chip, and how many kernels its programs have."""
    factors = FactorisedWeights.Config(rank=64, layers=("attention",), rank_cache=rank_cache)
    mesh, dispatches = engine_dispatches(small_engine(weights=factors), topology_devices(parse_topology(topology)))
    found = {}
    for kind in ("prefill", "decode"):
        program = next(one for one in dispatches if one.kind == kind)
        with jax.set_mesh(mesh):
            compiled = program.trace().lower().compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        kernels = (compiled.as_text() or "").count('"tpu_custom_call"')
        found[kind] = {"temporary": memory.temp_size_in_bytes, "pool": memory.alias_size_in_bytes, "kernels": kernels}
    return found
