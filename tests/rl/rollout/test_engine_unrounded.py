"""Parameters that layers compute with unrounded: engines have the trainer's, and choose the experts that it scores."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import Params, bind, build_abstract, split
from axlearn_like.layers.contexts.paged import RowContext
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import BiasedSoftmaxRouter, SigmoidRouter, SoftmaxRouter
from axlearn_like.layers.parameter_names import path_name
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.layers.wrappers.quantised import StoredWeights
from mesh import make_mesh
from rl.parameter_server.client import connect
from rl.parameter_server.push.rounded_copies import rounded_dtypes
from rl.parameter_server.server import ParameterServer
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.weights import WeightLayout, types_read
from rl.rollout.request import Request, StopConditions
from rl.training.columns import recording
from rl.training.logprobs import fill_rows
from tests.rl.tiny import make_prompt, tiny_params, tiny_policy

LENGTH = 40
ROUTER = "layers/feed_forward/router"


def policy(router: Any, **attention: Any) -> Decoder.Config:
    cfg = tiny_policy(num_layers=2).set(dtype="bfloat16")
    assert isinstance(cfg.block, Block.Config) and isinstance(cfg.block.attention, Attention.Config)
    mixture = MoE.Config(num_experts=6, router=router, experts=Experts.Config(hidden=24))
    cfg.block = cfg.block.clone(feed_forward=mixture, attention=cfg.block.attention.clone(**attention))
    return cfg


def of_float32(described: Params) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(described)
    return {path_name(path) for path, leaf in leaves if leaf.dtype == jnp.float32}


def norms(cfg: Decoder.Config) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(split(build_abstract(cfg))[1])
    return {name for path, _ in leaves if (name := path_name(path)).endswith("/scale")}


@pytest.mark.parametrize(
    ("router", "attention", "expected"),
    [
        (SoftmaxRouter.Config(top_k=2), {}, {f"{ROUTER}/weight_de"}),
        (SigmoidRouter.Config(top_k=2), {}, {f"{ROUTER}/weight_de", f"{ROUTER}/balance_bias_e"}),
        (
            SoftmaxRouter.Config(top_k=2),
            {"sinks": True},
            {f"{ROUTER}/weight_de", "layers/attention/sinks_kq"},
        ),
    ],
)
@pytest.mark.parametrize("numerics", ["default", "exact"])
def test_engines_hold_and_read_it_as_the_trainer_has_it(
    router: Any, attention: dict[str, Any], expected: set[str], numerics: Any
):
    cfg = policy(router, **attention).set(numerics=numerics)
    layout = WeightLayout(cfg, make_mesh(), stacked=True)
    assert of_float32(layout.described) == of_float32(layout.like) == expected | norms(cfg)
    in_list = WeightLayout(cfg, make_mesh(), stacked=False)
    assert of_float32(in_list.like) == expected | norms(cfg)
    each = {name.replace("layers/", f"layers/{index}/") for name in expected | norms(cfg) for index in (0, 1)}
    assert of_float32(in_list.described) == each
    read = types_read(RolloutEngine.Config(model=cfg, stop_tokens=(1,), max_prompt_tokens=8, max_new_tokens=8))
    leaves = jax.tree_util.tree_leaves_with_path(split(build_abstract(cfg))[1])
    names = {name for path, _ in leaves if read(name := path_name(path), np.dtype("float32")) == np.float32}
    assert names == expected | norms(cfg)


def test_a_subclass_a_wrapper_and_quantised_matrices_declare_theirs():
    biased = BiasedSoftmaxRouter.Config(top_k=1, dim=8, num_experts=4)
    assert set(build_abstract(biased).unrounded_paths()) == {"weight_de", "bias_e"}
    plain = policy(SoftmaxRouter.Config(top_k=2))
    assert isinstance(plain.block, Block.Config)
    stored = WeightLayout(plain, make_mesh(), stacked=True, stored=StoredWeights.Config()).described
    kept = of_float32(stored)
    assert {"layers/feed_forward/inner/router/weight_de", "layers/feed_forward/inner/experts/up_edf/scale"} <= kept
    kinds = {path_name(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(stored)}
    assert kinds["layers/feed_forward/inner/experts/up_edf/qvalue"] == jnp.int8
    wrapped = plain.clone()
    wrapped.block = plain.block.clone(feed_forward=LoRA.Config(inner=plain.block.feed_forward, rank=2, match="*"))
    assert "layers/feed_forward/inner/router/weight_de" in set(build_abstract(wrapped).unrounded_paths())


def close_calls(cfg: Decoder.Config) -> Params:
    """Weights with routers of which every second expert is another one in bfloat16, and not quite in float32."""
    params = tiny_params(cfg)
    router = params["layers"]["feed_forward"]["router"]
    firsts = np.asarray(router["weight_de"][..., ::2].astype(jnp.bfloat16)).astype(np.float32)
    seconds = firsts * (1 + 1.5e-3 * np.random.default_rng(1).uniform(-1, 1, firsts.shape)).astype(np.float32)
    assert np.all(seconds.astype(jnp.bfloat16) == firsts) and np.any(seconds != firsts)
    router["weight_de"] = np.stack([firsts, seconds], -1).reshape(router["weight_de"].shape)
    return params


def chosen(cfg: Decoder.Config, params: Params, rows: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """The experts of each rollout by the trainer's forward pass over whole rows, int32 [tokens, layers, 1]."""
    tokens = fill_rows(rows, len(rows), LENGTH)["tokens"]
    graphdef = split(build_abstract(recording(cfg)))[0]
    context = RowContext(jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape))
    routing = np.asarray(jax.jit(lambda params: bind(graphdef, params).hidden(tokens, context).aux.routing)(params))
    return [routing[:, row, : len(p) + len(t) - 1].transpose(1, 0, 2) for row, (p, t) in enumerate(rows)]


@pytest.mark.full
def test_an_engine_in_bfloat16_chooses_the_experts_that_its_trainer_scores():
    """A real push and pull by each codec, where a rounded router would choose others."""
    cfg = policy(SoftmaxRouter.Config(top_k=1))
    params = close_calls(cfg)
    sizes: dict[str, Any] = {"stop_tokens": (3,), "max_prompt_tokens": 24, "max_new_tokens": 12, "max_num_seqs": 4}
    engine = RolloutEngine.Config(model=recording(cfg), **sizes).build()
    prompts = [make_prompt(number, 3 + 5 * number) for number in range(4)]
    requests = [Request(prompt, samples=2, seed=5, stop=StopConditions((3,))) for prompt in prompts]
    like = jax.tree.map(jnp.asarray, params)
    types = rounded_dtypes(like, types_read(engine.cfg))
    as_read = lambda path, leaf: leaf.astype(types.get(path_name(path), leaf.dtype))  # noqa: E731
    published = jax.tree_util.tree_map_with_path(as_read, like)
    for version, codec in enumerate(("raw", "delta", "bf16", "int8")):
        server = ParameterServer.Config(shared_memory=False, codec=codec).build()
        client = connect(server.cfg, [server.listen])
        publisher = client.publisher(
            dtypes=types_read(engine.cfg), unrounded=frozenset(build_abstract(cfg).unrounded_paths())
        )
        publisher.publish_async(like, version).wait()
        there, ours = (tree["layers"]["feed_forward"] for tree in (client.receiver(published).pull(version), like))
        np.testing.assert_array_equal(there["router"]["weight_de"], ours["router"]["weight_de"])
        assert np.any(there["experts"]["up_edf"] != ours["experts"]["up_edf"])
        pulled = client.receiver(engine.runner.weights_like).pull(version)
        engine.set_weights(pulled, version)
        rollouts = engine.generate(requests)
        rows = [(prompts[number // 2].tokens, rollout.tokens) for number, rollout in enumerate(rollouts)]
        rounded = jax.tree.map(lambda leaf: leaf, params)
        router = rounded["layers"]["feed_forward"]["router"]
        router["weight_de"] = router["weight_de"].astype(jnp.bfloat16).astype(np.float32)
        others = np.concatenate(chosen(cfg, rounded, rows))
        ours = np.concatenate([record for rollout in rollouts if (record := rollout.routing) is not None])
        assert np.mean(others != ours) > 0.2
        if codec != "int8":  # the other matrices of which are approximate
            np.testing.assert_array_equal(ours, np.concatenate(chosen(cfg, params, rows)))
        client.close()
        server.close()
