"""Engines that decode from the pages themselves, as on GPUs, draw what those that copy them do, in half the memory."""

from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.contexts.latents import expands_latents
from axlearn_like.layers.wrappers.low_rank.factorised import FactorisedWeights
from mesh import make_mesh
from models.tiny import tiny
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.dispatches import largest_dispatches
from rl.rollout.model_runner.runner import ModelRunner
from rl.rollout.request import Request
from rl.rollout.sampling import RecordedSampler
from rl.rollout.speculation.speculator import Speculation
from rl.training.logprobs import fill_rows
from tests.elsewhere import elsewhere
from tests.rl.rollout import small, test_engine_families, test_engine_routing
from tests.rl.rollout.small import POLICY, STOP, TEMPERATURE, assert_no_page_is_held, make_engine
from tests.rl.rollout.test_adapters import LIMITS, NAMES, adapter
from tests.rl.rollout.test_engine_mesh import TWO_DEVICES
from tests.rl.tiny import make_prompt, tiny_params

pytestmark = pytest.mark.numerics

LONG: dict[str, Any] = {"max_prompt_tokens": 300, "max_new_tokens": 20, "page_size": 16, "prefill_tokens": 256}


def requests(samples: int = 3) -> list[Request]:
    """Prompts of one split of keys and of two."""
    return [Request(make_prompt(n, length), samples=samples, seed=3) for n, length in enumerate((290, 41, 257))]


@pytest.mark.full
def test_log_probabilities_are_those_of_scoring():
    """Samples share their prompts, in pages so few that some are preempted."""
    engine = make_engine(decode_from="pages", cascade=3, pages=40, **LONG)
    found = engine.generate(requests())
    assert engine.stats()["preemptions"] > 0
    assert_no_page_is_held(engine)
    prompts = [one.prompt.tokens for one in requests() for _ in range(3)]
    rows = fill_rows([(p, r.tokens) for p, r in zip(prompts, found, strict=True)], len(found), 320)
    scored = small._scores(small.params(), rows["tokens"], rows["targets"], np.array([TEMPERATURE], np.float32))
    for prompt, rollout, logprobs in zip(prompts, found, scored.logprobs(), strict=True):
        own = slice(len(prompt) - 1, len(prompt) - 1 + len(rollout.tokens))
        np.testing.assert_allclose(rollout.logprobs, logprobs[own], rtol=0, atol=4e-5)


def latent(decode: str) -> Any:
    policy = POLICY.clone()
    attention: Any = LatentAttention.Config(num_heads=2, kv_rank=12, nope_dim=8, rope_dim=4, value_dim=8)
    policy.block = policy.block.clone(attention=attention.set(decode=decode))
    return policy


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"kv_cache_dtype": "int8"},
    "drafts": {"speculation": Speculation.Config()},
    "shared keys of int8": {"cascade": 2, "kv_cache_dtype": "int8"},
    "latents": {"model": latent("expanded")},
    "latents, absorbed": {"model": latent("absorbed")},
    "rank space": {"stored": FactorisedWeights.Config(rank=4, layers=("attention",), rank_cache=True)},
    "recorded support": {"sampler": RecordedSampler.Config(temperature=0.8, top_p=0.9, most=8)},
    "recorded routing": {"model": test_engine_routing.RECORDING},
    "windows and caps": {"model": test_engine_families.windowed()},
    "sinks and experts": {"model": test_engine_families.sinks()},
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_it_draws_what_an_engine_with_windows_does(case: str):
    changes = {**LONG, **CASES[case]}
    weights = tiny_params(changes.get("model", POLICY))
    pages, windows = (
        make_engine(weights, decode_from=one, **changes).generate(requests()) for one in ("pages", "windows")
    )
    for found, expected in zip(pages, windows, strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-4)
        assert (found.routing is None) == (expected.routing is None)
        if found.routing is not None:
            np.testing.assert_array_equal(found.routing, expected.routing)


@pytest.mark.full
def test_adapters_of_rows_draw_what_they_do_on_windows():
    asked = [Request(make_prompt(3, 280), adapter=name, seed=5) for name in (None, *NAMES)]

    def drawn(decode_from: str) -> list[Any]:
        engine = make_engine(adapters=LIMITS, decode_from=decode_from, **LONG)
        for name in NAMES:
            engine.load_adapter(name, adapter(name))
        return engine.generate(asked)

    for found, expected in zip(drawn("pages"), drawn("windows"), strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-4)


def drawn_on(mesh: dict[str, int]) -> list[Any]:
    engine = make_engine(decode_from="pages", mesh=mesh, cascade=3, kv_cache_dtype="int8", **LONG)
    return [[r.tokens.tolist(), r.logprobs.tolist()] for r in engine.generate(requests())]


@pytest.mark.full
def test_on_two_devices_it_draws_the_same_tokens():
    found = elsewhere(drawn_on, {"tensor": 2}, environ=TWO_DEVICES)
    for (tokens, logprobs), (expected, exact) in zip(found, drawn_on({}), strict=True):
        assert tokens == expected
        np.testing.assert_allclose(logprobs, exact, rtol=0, atol=2e-3)  # a last bit may decide between two int8 numbers


def size(arrays: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "int8"}], ids=["float32", "int8"])
def test_no_second_cache_is_held(changes: dict[str, Any]):
    """A dispatch of 32 rows of 32,768 keys, whose windows would be the cache in float32 once more."""
    policy = tiny(vocab_size=64, dim=64, hidden=64, num_layers=3)
    cfg = RolloutEngine.Config(
        model=policy, stop_tokens=(), max_prompt_tokens=1024, max_new_tokens=31_744, max_num_seqs=32
    )
    runner = ModelRunner(cfg.set(decode_from="pages", **changes), jax.devices()[:1])  # described: nothing is allocated
    (decode, _) = (one for one in largest_dispatches(runner) if one.kind == "decode")
    with jax.set_mesh(make_mesh()):
        memory: Any = decode.trace().lower().compile().memory_analysis()
    pool, held = size(runner.cache.pool), size(runner.params)
    heads, width = 2, 32
    layer = 32 * 32_768 * 2 * heads * width * 4
    assert memory.alias_size_in_bytes >= pool  # in place
    assert memory.argument_size_in_bytes - pool - held < 1 << 21  # page tables and the like: no windows
    assert memory.temp_size_in_bytes < layer / 2  # not even one layer of them, where windows are three
    other = ModelRunner(cfg.clone(decode_from="windows"), jax.devices()[:1])
    with jax.set_mesh(other.mesh):
        assert size(other.cache.windows(32)) == 3 * layer


def test_pages_are_read_where_they_are_on_gpus_and_copied_on_cpus():
    cfg = RolloutEngine.Config(model=POLICY, stop_tokens=STOP, max_prompt_tokens=8, max_new_tokens=8)

    def found(platform: str, expands: bool = False, **changes: Any) -> str:
        return cfg.clone(**changes).decodes_from(platform, expands=expands)

    assert [found(one) for one in ("cpu", "gpu", "tpu")] == ["windows", "pages", "pages"]
    assert [found(one, decode_from="windows") for one in ("cpu", "gpu")] == ["windows", "windows"]
    assert [found(one, expands=True) for one in ("gpu", "tpu")] == ["windows", "pages"]
    assert [found(one, expands=True, decode_from="pages") for one in ("cpu", "gpu")] == ["pages", "pages"]
    policies = POLICY, latent("expanded"), latent("absorbed")
    assert [expands_latents(build_abstract(one)) for one in policies] == [False, True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": PagedKernel.Config(interpret=True), "decode_from": "windows"}, "None on TPUs, where a kernel"),
        ({"model": POLICY.clone(numerics="exact"), "decode_from": "pages"}, r'None with policy\.numerics="exact"'),
    ],
    ids=["the kernel for TPUs", "exact numerics"],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=rf"decode_from: expected {message}"):
        make_engine(**changes)
