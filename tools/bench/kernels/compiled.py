"""Compilation of the kernels for a TPU that need not be there, beside plain XLA: a process for each topology.

    python -m tools.bench.kernels.compiled v5p:2x2x1 FOLDER

prints JSON: for each kernel, bytes of temporary memory, the bytes of plain XLA for the same, the copies of whole
operands in the scheduled program; and of programs with kernels, what the compiler says of their code (see llo.py),
which it writes into the folder. Nothing runs.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.exact.attention import exact_paged_attention
from axlearn_like.kernels.low_rank_ffn import GLUFactors, by_kernel, by_xla
from axlearn_like.kernels.paged_attention.cascade import cascade_attention
from axlearn_like.kernels.paged_attention.int8 import int8_attention
from axlearn_like.kernels.paged_attention.int8_scales import make_int8_kernel_pool
from axlearn_like.kernels.paged_attention.pages import make_pool
from axlearn_like.kernels.paged_attention.ragged import ragged_attention
from axlearn_like.kernels.paged_attention.rows import PagedRows, RankRows, SharedTiles
from axlearn_like.kernels.policy_head.statistics import policy_statistics
from axlearn_like.kernels.policy_head.sums import HeadRules
from axlearn_like.kernels.rank_space.attention import rank_space_attention
from axlearn_like.kernels.rank_space.factors import KeySteps, KeyValueFactors, make_rank_pool
from axlearn_like.kernels.rank_space.self_test import rotated_keys
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.embedding import Head
from axlearn_like.training.losses import token_logprobs
from axlearn_like.training.tiled_head import OtherHead, head_statistics
from mesh import make_mesh, to_named_sharding
from mesh.topology import parse_topology, topology_devices
from tools.bench.kernels.llo import kernel_code

SHARDS = 4  # devices that share the words of a head
TOKENS, WIDTH, WORDS = 8192, 2048, 151_936  # of the head: Qwen3's vocabulary
ROWS, KEYS, PAGE, HEADS, PER_HEAD, HEAD_DIM = 64, 8192, 16, 8, 4, 128  # of decoding: heads of Qwen3-8B, tiles of 16
CHUNK, KV_RANK = 2048, 512  # tokens of a prompt's chunk; half of the 8 x 128 numbers of keys, and of values
LOW_RANK_WIDTH, UNITS, RANK = 4096, 14_336, 1024  # of feed-forward networks: those of Llama-3.1-8B

INT8_PAGE = 64  # tokens, whose scales are as wide as a register


def plan(topology: str, folder: Path) -> dict[str, Any]:
    """Return the figures by kernel, of one device; `folder`: to which libtpu writes the code."""
    mesh = make_mesh({}, topology_devices(parse_topology(topology))[:1])
    with jax.set_mesh(mesh):
        found = _plan(jax.NamedSharding(mesh, jax.P()), folder)
    return found | _sharded_heads(make_mesh({"tensor": SHARDS}, topology_devices(parse_topology(topology))))


def _plan(sharding: jax.sharding.Sharding, folder: Path) -> dict[str, Any]:
    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def compiled(run: Callable[..., Any], *arrays: Any, donate: tuple[int, ...] = ()) -> dict[str, int]:
        done = jax.jit(run, donate_argnums=donate).lower(*arrays).compile()
        memory, text = done.memory_analysis(), done.as_text() or ""
        assert memory is not None
        copies = sum(" copy(" in line or "copy-start(" in line for line in text.splitlines())
        code = kernel_code(folder, text)
        return {"temp_bytes": memory.temp_size_in_bytes, "copies": copies, **(code if code["bundles"] else {})}

    head = array(TOKENS, WIDTH), array(WIDTH, WORDS), array(TOKENS, dtype=jnp.int32)
    pool = array(*jax.eval_shape(lambda: make_pool(1, ROWS * KEYS // PAGE // 2, PAGE, HEADS, HEAD_DIM)).shape)
    tiles = [array(ROWS // 16, dtype=jnp.int32)] * 2
    found: dict[str, Any] = {}
    for name, loss in (("kernel", tiled_head(kernel=True)), ("scan", tiled_head(kernel=False)), ("whole", whole_head)):
        found[f"head_{name}"] = compiled(jax.value_and_grad(loss, argnums=(0, 1)), *head)
    found["paged_attention"] = compiled(ragged_attention, _rows(array, PAGE), pool, donate=(1,))
    found["cascade_attention"] = compiled(_cascade, _rows(array, PAGE), pool, *tiles, donate=(1,))
    found["exact_paged_attention"] = compiled(_exact, _rows(array, PAGE), pool, donate=(1,))
    found["int8_paged_attention"] = compiled(int8_attention, *_int8_arrays(array), donate=(1,))
    for name, run, arrays in _networks(array):
        found[name] = compiled(run, *arrays)
    for name, run, arrays in rank_space_programs(array):
        found[name] = compiled(run, *arrays, donate=(1,))
    found["paged_attention_by_xla"] = compiled(_gathered, _rows(array, PAGE), pool, donate=(1,))
    return found


def tiled_head(*, kernel: bool) -> Callable[..., jax.Array]:
    """Return the sum of log-probabilities and entropies, by tiles of words."""

    def loss(x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
        found = policy_statistics(x, weight, targets, HeadRules(tile=512), kernel=kernel)
        return jnp.sum(found.logprob) + jnp.sum(found.entropy)

    return loss


def whole_head(x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the same of logits that are whole."""
    logprobs = jax.nn.log_softmax(jnp.dot(x, weight, preferred_element_type=jnp.float32), axis=-1)
    chosen = jnp.where(jnp.arange(weight.shape[1]) == targets[:, None], logprobs, 0.0)
    return jnp.sum(chosen) - jnp.sum(jnp.exp(logprobs) * logprobs)


def _sharded_heads(mesh: Mesh) -> dict[str, Any]:
    """Return the plans of a head whose words are sharded, in tiles and of whole logits, without and with a KL."""

    def tiled(head: Any, x: Any, targets: Any, other: Any = None) -> jax.Array:
        found = head_statistics(head, x, targets, temperature=1.0, tile=512, reference=other)
        return sum(map(jnp.sum, (found.logprob, found.entropy, *(() if other is None else (found.kl,)))), jnp.zeros(()))

    def whole(head: Any, x: Any, targets: Any, other: Any = None) -> jax.Array:
        logits = head.logits(x)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        found = jnp.sum(token_logprobs(logits, targets)) - jnp.sum(jnp.exp(logprobs) * logprobs)
        if other is None:
            return found
        others = jax.lax.stop_gradient(jax.nn.log_softmax(other.output.logits(other.x), axis=-1))
        return found + jnp.sum(jnp.exp(logprobs) * (logprobs - others))

    def planned(statistics: Callable[..., jax.Array], *, kl: bool) -> dict[str, int]:
        def loss(params: Any, x: jax.Array, targets: jax.Array, other_params: Any, other_x: Any) -> jax.Array:
            other = OtherHead(other_x, bind(graphdef, other_params)) if kl else None
            return statistics(bind(graphdef, params), x, targets, other)

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        memory = run.lower(params, x, targets, params, x).compile().memory_analysis()
        assert memory is not None
        return {"temp_bytes": memory.temp_size_in_bytes}

    with jax.set_mesh(mesh):
        graphdef, abstract = split(build_abstract(Head.Config(dim=WIDTH, vocab_size=WORDS)))
        params = jax.tree.map(lambda leaf: leaf.update(dtype=jnp.bfloat16), to_named_sharding(abstract, mesh))
        everywhere = jax.NamedSharding(mesh, jax.P())
        x = jax.ShapeDtypeStruct((1, TOKENS, WIDTH), jnp.bfloat16, sharding=everywhere)
        targets = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32, sharding=everywhere)
        return {
            f"sharded_head_{name}{'_kl' if kl else ''}": planned(fn, kl=kl)
            for kl in (False, True)
            for name, fn in (("scan", tiled), ("whole", whole))
        }


def _networks(array: Callable[..., Any]) -> list[tuple[str, Callable[..., Any], Any]]:
    """Return gated feed-forward networks of factors, by the kernel and by XLA, and of matrices, and their arrays."""

    def combine(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up

    x, wide = array(TOKENS, LOW_RANK_WIDTH), (array(LOW_RANK_WIDTH, RANK), array(RANK, UNITS))
    factors = GLUFactors(*wide, *wide, array(UNITS, RANK), array(RANK, LOW_RANK_WIDTH))
    matrices = [array(LOW_RANK_WIDTH, UNITS)] * 2 + [array(UNITS, LOW_RANK_WIDTH)]
    return [
        ("low_rank_ffn", lambda x, factors: by_kernel(x, factors, combine), (x, factors)),
        ("low_rank_ffn_by_xla", lambda x, factors: by_xla(x, factors, combine), (x, factors)),
        ("dense_ffn_by_xla", lambda x, gate, up, down: combine(x @ gate, x @ up) @ down, (x, *matrices)),
    ]


def rank_space_programs(array: Callable[..., Any]) -> list[tuple[str, Callable[..., Any], Any]]:
    """Return attention over a cache in rank space, of single tokens and of a chunk, by the kernel and by XLA.

    Beside them attention to keys and values of the same chunk. Arrays are rows, pool, and factors where there are some.
    """
    head, programs = (HEADS, HEAD_DIM), []
    steps = KeySteps(tuple(10_000.0 ** (-i / HEAD_DIM) for i in range(0, HEAD_DIM, 2)), 1.0, None, False, HEAD_DIM)
    matrix: Any = array(KV_RANK, *head)
    factors = KeyValueFactors(matrix, matrix, None, None, None, steps)
    for name, count, chunk in (("attention", ROWS, 1), ("prefill", 1, CHUNK)):
        pages = count * KEYS // PAGE // 2
        numbers: Any = [array(*x, dtype=jnp.int32) for x in ((count, KEYS // PAGE), (count,), (count,))]
        q, low = array(count, chunk, HEADS, PER_HEAD, HEAD_DIM), array(count, chunk, KV_RANK)
        pool = jax.eval_shape(lambda pages=pages: make_rank_pool(1, pages, PAGE, KV_RANK, jnp.bfloat16))["latent"]
        arrays = RankRows(*(q, low, low, *numbers)), array(*pool.shape), factors
        programs += [(f"rank_space_{name}", _in_rank_space, arrays), (f"rank_space_{name}_by_xla", _expanded, arrays)]
        if chunk > 1:
            kv, pool = array(count, chunk, *head), jax.eval_shape(lambda pages=pages: make_pool(1, pages, PAGE, *head))
            programs.append(
                (f"paged_{name}", ragged_attention, (PagedRows(*(q, kv, kv, *numbers)), array(*pool.shape)))
            )
    return programs


def _in_rank_space(rows: RankRows, pool: Any, factors: KeyValueFactors) -> Any:
    return rank_space_attention(rows, pool, factors, rules=ScoreRules())


def _expanded(rows: RankRows, pool: Any, factors: KeyValueFactors) -> Any:
    """Write by scatter, gather all pages, make their keys and values, rotate, attend."""
    q, k, v, table, starts, counts = rows
    (count, chunk), at = q.shape[:2], starts[:, None] + jnp.arange(q.shape[1])
    new = jnp.stack([x.reshape(count, chunk, -1, 128) for x in (k, v)], axis=3).reshape(count, chunk, -1, 128)
    pool = pool.at[table[jnp.arange(count)[:, None], at // PAGE], at % PAGE].set(new)
    low = pool[table].reshape(count, KEYS, -1, 2, 128)
    keys, values = (
        jnp.einsum("rsl,lkh->rskh", low[:, :, :, side].reshape(count, KEYS, KV_RANK), matrix)
        for side, matrix in enumerate((factors.k_lkh, factors.v_lkh))
    )
    keys = rotated_keys(keys.astype(jnp.float32), factors.steps).astype(q.dtype)
    scores = jnp.einsum("rckqh,rskh->rkqcs", q, keys, preferred_element_type=jnp.float32)
    seen = (jnp.arange(KEYS) <= at[..., None]) & (jnp.arange(KEYS) < (starts + counts)[:, None, None])
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores * HEAD_DIM**-0.5, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("rkqcs,rskh->rckqh", weights, values), pool


def _rows(array: Callable[..., Any], page: int) -> PagedRows:
    """Return rows of one new token, whose tables are of pages of that size."""
    kv, q = array(ROWS, 1, HEADS, HEAD_DIM), array(ROWS, 1, HEADS, PER_HEAD, HEAD_DIM)
    return PagedRows(q, kv, kv, *(array(*x, dtype=jnp.int32) for x in ((ROWS, KEYS // page), (ROWS,), (ROWS,))))


def _int8_arrays(array: Callable[..., Any]) -> tuple[Any, ...]:
    """Return rows, and a pool of as many tokens."""
    pool = jax.eval_shape(lambda: make_int8_kernel_pool(1, ROWS * KEYS // INT8_PAGE // 2, INT8_PAGE, HEADS, HEAD_DIM))
    return _rows(array, INT8_PAGE), {name: array(*x.shape, dtype=x.dtype) for name, x in pool.items()}


def _cascade(rows: PagedRows, pool: Any, shared: Any, sources: Any) -> Any:
    return cascade_attention(rows, pool, SharedTiles(shared, sources, 16), rules=ScoreRules())


def _exact(rows: PagedRows, pool: Any) -> Any:
    return exact_paged_attention(rows, pool, rules=ScoreRules())


def _gathered(rows: PagedRows, pool: Any) -> Any:
    """Write by scatter, gather all pages, attend."""
    q, k, v, table, starts, counts = rows
    new = jnp.stack([k[:, 0], v[:, 0]], axis=2).reshape(ROWS, 2 * HEADS, HEAD_DIM)
    pool = pool.at[table[jnp.arange(ROWS), starts // PAGE], starts % PAGE].set(new)
    keys = pool[table].reshape(ROWS, KEYS, HEADS, 2, HEAD_DIM)
    scores = jnp.einsum("rkqh,rskh->rkqs", q[:, 0], keys[:, :, :, 0], preferred_element_type=jnp.float32)
    scores = jnp.where((jnp.arange(KEYS) < (starts + counts)[:, None])[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores * HEAD_DIM**-0.5, axis=-1).astype(q.dtype)
    return jnp.einsum("rkqs,rskh->rkqh", weights, keys[:, :, :, 1]), pool


if __name__ == "__main__":
    print(json.dumps(plan(sys.argv[1], Path(sys.argv[2]))))
