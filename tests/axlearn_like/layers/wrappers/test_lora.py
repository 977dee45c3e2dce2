"""Low-rank factors: against sums and gradients made by numpy, at the start, in training, merged, and on a mesh."""

import contextlib
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.checkpoint.convert import WrapPlain
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import FeedForward
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.wrappers.adapters import Adapter, Factors, adapter_of, insert, matrices, padded
from axlearn_like.layers.wrappers.adapters import adapted as adapted_rows
from axlearn_like.layers.wrappers.base import plain_config, plain_params
from axlearn_like.layers.wrappers.lora import LoRA, factor_names
from axlearn_like.layers.wrappers.low_rank.matrices import dropout_key, dropout_layer
from axlearn_like.learner import AdamW, Constant, Learner, ParameterGroup
from axlearn_like.training.losses import make_supervised_loss
from axlearn_like.training.step import init_state, make_train_step
from mesh import UserError, make_mesh, shard_batch, to_named_sharding
from tests.axlearn_like.layers.small import initialise, small_decoder
from tests.axlearn_like.training.step_mesh import make_batch
from tests.bounds import within
from tests.elsewhere import elsewhere

pytestmark = pytest.mark.numerics

RANK, ALPHA = 2, 6.0
GROUPS = (ParameterGroup.Config(match="*/lora/*"), ParameterGroup.Config(frozen=True))
Flat = dict[str, Any]


def adapted(**changes: Any) -> Decoder.Config:
    """Two layers, attention and a mixture of experts, all with factors."""
    cfg = small_decoder(num_layers=2, **changes)
    assert isinstance(cfg.block, Block.Config)
    router = SoftmaxRouter.Config(top_k=2)
    moe = MoE.Config(num_experts=4, router=router, experts=Experts.Config(hidden=16))
    cfg.block.attention = LoRA.Config(inner=cfg.block.attention, rank=RANK, alpha=ALPHA, dropout=0.25)
    cfg.block.feed_forward = LoRA.Config(inner=moe, rank=RANK, alpha=ALPHA)
    return cfg


def learner(**changes: Any) -> Learner:
    adam = Learner.Config(optimizer=AdamW.Config(weight_decay=0.1), schedule=Constant.Config(lr=1e-2), groups=GROUPS)
    return adam.set(**changes).build()


def flat(params: Any) -> Flat:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


# Layer by layer: the matrix (as the plain model calls it) and its product, by hand.
PRODUCTS = {
    "attention/q_dkqh": "ndl,nlkqh->ndkqh",
    "attention/k_dkh": "ndl,nlkh->ndkh",
    "attention/v_dkh": "ndl,nlkh->ndkh",
    "attention/out_kqhd": "nkqhl,nld->nkqhd",
    "feed_forward/experts/gate_edf": "nedl,nelf->nedf",
    "feed_forward/experts/up_edf": "nedl,nelf->nedf",
    "feed_forward/experts/down_efd": "nefl,neld->nefd",
}


def factors(name: str) -> tuple[str, str]:
    layer, _, inside = name.partition("/")
    stem, _, letters = inside.rpartition("_")
    split_at = {"out_kqhd": 3, "experts/gate_edf": 2, "experts/up_edf": 2, "experts/down_efd": 2}.get(inside, 1)
    stack = "e" if letters[0] == "e" else ""
    return (
        f"layers/{layer}/lora/{stem}_a_{letters[:split_at]}l",
        f"layers/{layer}/lora/{stem}_b_{stack}l{letters[split_at:]}",
    )


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    """One program: losses, gradients and logits of the adapted model and of the plain one with merged weights."""
    cfg = adapted()
    graphdef, params = initialise(cfg)
    plain_graphdef, _ = split(build_abstract(plain_config(cfg)))
    batch = {name: jnp.asarray(x[:4]) for name, x in make_batch().items()}

    @jax.jit
    def both(params: Any) -> Any:
        merged = plain_params(graphdef, params)
        of = jax.value_and_grad(make_supervised_loss(graphdef), has_aux=True)
        of_merged = jax.value_and_grad(make_supervised_loss(plain_graphdef), has_aux=True)
        return merged, of(params, batch), of_merged(merged, batch)

    merged, ((loss, _), grads), ((merged_loss, _), merged_grads) = both(params)
    return {
        "params": flat(params), "merged": flat(merged), "losses": (float(loss), float(merged_loss)),
        "grads": flat(grads), "merged_grads": flat(merged_grads),
    }  # fmt: skip


@pytest.mark.slow
def test_weights_are_the_sum_that_numpy_makes(run: dict[str, Any]):
    for name, product in PRODUCTS.items():
        layer, _, inside = name.partition("/")
        a, b = (run["params"][factor].astype(np.float64) for factor in factors(name))
        expected = run["params"][f"layers/{layer}/inner/{inside}"] + ALPHA / RANK * np.einsum(product, a, b)
        np.testing.assert_allclose(run["merged"][f"layers/{name}"], expected, atol=1e-5)
        assert np.abs(ALPHA / RANK * np.einsum(product, a, b)).mean() > 0.01


def test_all_else_is_as_it_was(run: dict[str, Any]):
    base = {name.replace("/inner/", "/"): value for name, value in run["params"].items() if "/lora/" not in name}
    assert base.keys() == run["merged"].keys()
    same = {name for name in base if (base[name] == run["merged"][name]).all()}
    assert same == base.keys() - {f"layers/{name}" for name in PRODUCTS}
    assert "layers/feed_forward/router/weight_de" in same


@pytest.mark.slow
def test_with_factors_of_zero_it_is_the_inner_model_to_the_bit():
    cfg = LoRA.Config(inner=Attention.Config(dim=16, num_heads=2), rank=RANK)
    graphdef, params = initialise(cfg)
    params["lora"] = {name: value * ("_a_" in name) for name, value in params["lora"].items()}
    made = flat(plain_params(graphdef, params))
    assert all((made[name] == value).all() for name, value in flat(params["inner"]).items())


def test_merged_it_computes_the_same(run: dict[str, Any]):
    loss, merged = run["losses"]
    assert loss == pytest.approx(merged, rel=1e-6) and loss > 1


def test_gradients_of_factors_follow_from_those_of_the_sum(run: dict[str, Any]):
    for name, product in PRODUCTS.items():
        (first, second), (a, b) = factors(name), product.partition("->")[0].split(",")
        of_sum, out = run["merged_grads"][f"layers/{name}"] * ALPHA / RANK, product.partition("->")[2]
        of_a = np.einsum(f"{out},{b}->{a}", of_sum, run["params"][second])
        of_b = np.einsum(f"{out},{a}->{b}", of_sum, run["params"][first])
        np.testing.assert_allclose(run["grads"][first], of_a, atol=2e-6)
        np.testing.assert_allclose(run["grads"][second], of_b, atol=2e-6)
        assert np.abs(of_a).max() > 1e-4


def steps(shape: dict[str, int] | None, count: int) -> dict[str, Any]:
    """A run from the start, with frozen weights; on a mesh if there is one."""
    mesh = make_mesh(shape) if shape else None
    cfg, learn, graphdefs = adapted(), learner(), []

    def init(key: jax.Array) -> Any:
        graphdef, params = split(cfg.build(rngs=nnx.Rngs(key)))
        graphdefs.append(graphdef)
        return init_state(params, learn)

    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        abstract = jax.eval_shape(init, jax.random.key(3))
        where = jax.tree.map(lambda a: a.sharding, to_named_sharding(abstract, mesh)) if mesh else None
        state = jax.jit(init, out_shardings=where)(jax.random.key(3))
        born, batch = flat(jax.device_get(state["params"])), shard_batch(make_batch())
        step = make_train_step(make_supervised_loss(graphdefs[0]), learn, dropout=0)
        losses = []
        for _ in range(count):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        merge = jax.jit(lambda params: plain_params(graphdefs[0], params))
        merged = merge(state["params"])
        specs = {
            name: str(leaf.sharding.spec) if mesh else ""
            for name, leaf in (
                ("a", state["params"]["layers"]["attention"]["lora"]["out_a_kqhl"]),
                ("b", state["params"]["layers"]["feed_forward"]["lora"]["experts"]["gate_b_elf"]),
                ("merged", merged["layers"]["attention"]["out_kqhd"]),
                ("base", state["params"]["layers"]["attention"]["inner"]["out_kqhd"]),
            )
        }
        after = flat(jax.device_get(state["params"]))
        return {"losses": losses, "born": born, "after": after, "merged": flat(jax.device_get(merged)), "specs": specs}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    born, after = found["born"], found["after"]
    return {
        "losses": found["losses"],
        "specs": found["specs"],
        "size_at_first": {name: float(np.abs(value).mean()) for name, value in born.items()},
        "changed": [name for name in born if (born[name] != after[name]).any()],
    }


def alone_and_on_a_mesh() -> dict[str, Any]:
    jax.config.update("jax_num_cpu_devices", 8)
    alone, there = steps(None, 3), steps({"fsdp": 2, "expert": 2, "tensor": 2}, 3)
    apart = {
        part: max(float(np.abs(there[part][name] - value).max()) for name, value in alone[part].items())
        for part in ("born", "after", "merged")
    }
    return {"alone": summary(alone), "there": summary(there), "apart": apart}


def assert_only_factors_learn(trained: dict[str, Any]) -> None:
    for first, second in map(factors, PRODUCTS):
        assert trained["size_at_first"][second] == 0 and trained["size_at_first"][first] > 0.05
    assert set(trained["changed"]) == {factor for name in PRODUCTS for factor in factors(name)}
    losses = trained["losses"]
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.slow
def test_it_begins_as_the_inner_model_and_only_factors_learn():
    assert_only_factors_learn(summary(steps(None, 3)))


@pytest.mark.full
def test_factors_are_spread_as_their_matrix_and_give_the_results_of_one_device():
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
    found = elsewhere(alone_and_on_a_mesh, environ=quick, timeout=600)
    assert_only_factors_learn(found["there"])
    specs = found["there"]["specs"]
    assert specs == {
        "a": "P(None, 'tensor', None, None, None)",
        "b": "P(None, 'expert', None, 'tensor')",
        "merged": specs["base"],
        "base": "P(None, 'tensor', None, None, 'fsdp')",
    }
    assert found["alone"]["losses"] == pytest.approx(found["there"]["losses"], rel=1e-5)
    assert found["apart"]["born"] == 0 and within(max(found["apart"].values()), 2e-3)


@pytest.mark.slow
def test_a_plain_checkpoint_becomes_the_start():
    cfg = adapted()
    _, plain = initialise(plain_config(cfg))
    abstract = split(build_abstract(cfg))[1]
    conversion = WrapPlain.Config(seed=1).build()
    assert jax.tree.map(jnp.shape, conversion.saved(abstract)) == jax.tree.map(jnp.shape, plain)
    made = flat(conversion.convert(plain, abstract))
    assert {name: value.shape for name, value in made.items()} == {n: v.shape for n, v in flat_shapes(abstract).items()}
    for name, value in flat(plain).items():
        layers, layer, inside = (*name.split("/", 2), "")[:3]
        place = f"{layers}/{layer}/inner/{inside}" if layer in ("attention", "feed_forward") else name
        assert (made[place] == value).all()
    for name in PRODUCTS:
        first, second = factors(name)
        assert not made[second].any()
        assert np.abs(made[first][0] - made[first][1]).min() > 0  # other numbers in each layer
    q, fan_in = made["layers/attention/lora/q_a_dl"], 32
    assert q.std() == pytest.approx(0.88 * fan_in**-0.5, rel=0.2)


def flat_shapes(tree: Any) -> Flat:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def test_names_of_factors():
    assert factor_names("q_up_rkqh", 4) == ("q_up_a_rl", "q_up_b_lkqh", "...rl,...lkqh->...rkqh", "q_up_scale_kqh")
    assert factor_names("experts/down_efd", 4).a == "experts/down_a_efl"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank: expected 1 or more, got 0"),
        ({"dropout": 1.0}, "dropout: expected a share, 0 or more and below 1, got 1.0"),
        ({"match": "q_dkgh"}, "no matrix of Attention fits match='q_dkgh'.*did you mean 'q_dkqh'"),
    ],
)
def test_what_cannot_be_adapted_is_refused(changes: dict[str, Any], message: str):
    cfg = LoRA.Config(inner=Attention.Config(dim=16, num_heads=2), **changes)
    with pytest.raises(UserError, match=message):
        build_abstract(cfg)


@pytest.mark.slow
def test_dropout_is_on_the_input_of_the_first_factor():
    cfg = LoRA.Config(inner=FeedForward.Config(dim=16, hidden=8, activation="relu"), rank=RANK, dropout=0.5)
    graphdef, params = initialise(cfg)
    rng = np.random.default_rng(1)
    params["lora"] = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params["lora"])
    x, key = np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32), jax.random.key(7)
    keys = [jax.random.fold_in(jax.random.fold_in(key, 5), zlib.crc32(name)) for name in (b"up_df", b"down_fd")]

    def expected(x: Any, name: str, bias: str, key: jax.Array) -> Any:
        kept = np.asarray(jax.random.bernoulli(key, 0.5, x.shape))
        a, b = (np.asarray(params["lora"][one]) for one in factor_names(name, 2)[:2])
        plain = x @ np.asarray(params["inner"][name]) + np.asarray(params["inner"][bias])
        return plain + 16.0 / RANK * (np.where(kept, 2 * x, 0) @ a @ b)

    with dropout_key(key), dropout_layer(jnp.int32(5)):
        found = bind(graphdef, params)(jnp.asarray(x))[0]
    hidden = np.maximum(expected(x, "up_df", "up_bias_f", keys[0]), 0)
    np.testing.assert_allclose(found, expected(hidden, "down_fd", "down_bias_d", keys[1]), rtol=1e-4, atol=1e-4)
    assert np.abs(found - bind(graphdef, params)(jnp.asarray(x))[0]).max() > 0.1, "and not without a key"


@pytest.mark.full
def test_dropout_follows_from_step_and_microbatch():
    cfg = small_decoder(num_layers=2)
    assert isinstance(cfg.block, Block.Config)
    cfg.block.feed_forward = LoRA.Config(inner=cfg.block.feed_forward, rank=RANK, dropout=0.5)
    graphdef, params = initialise(cfg)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # the second factors too
    rows = {name: jnp.asarray(x[:1]) for name, x in make_batch().items()}
    batch = {name: jnp.concatenate([x, x]) for name, x in rows.items()}
    learn = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=0.0)).build()
    step = make_train_step(make_supervised_loss(graphdef), learn, 2, dropout=0)

    def loss(number: int) -> float:
        state = {**init_state(params, learn), "step": jnp.int32(number)}
        return float(step(jax.tree.map(jnp.copy, state), batch)[1]["loss"])

    losses = [loss(number) for number in (4, 5, 4)]  # as a run that was resumed at step 4 would draw
    assert losses[0] == losses[2] != losses[1]
    same = float(make_supervised_loss(graphdef)(params, batch)[0])
    assert all(abs(one - same) > 1e-4 for one in losses)
    with dropout_key(jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 4), 0)):
        first = float(make_supervised_loss(graphdef)(params, rows)[0])
    assert losses[0] != pytest.approx(2 * first, abs=1e-6), "equal microbatches have masks of their own"


def test_dropout_of_experts_is_refused():
    moe = MoE.Config(dim=16, num_experts=2, router=SoftmaxRouter.Config(top_k=1), experts=Experts.Config(hidden=8))
    with pytest.raises(UserError, match="dropout: expected 0 with experts/down_efd, which rows do not"):
        jax.eval_shape(lambda: LoRA.Config(inner=moe, dropout=0.1).build(rngs=nnx.Rngs(0)))


def test_some_matrices_can_be_chosen():
    cfg = LoRA.Config(inner=Attention.Config(dim=16, num_heads=2), match="[qv]_*")
    graphdef, params = initialise(cfg)
    assert sorted(params["lora"]) == ["q_a_dl", "q_b_lkqh", "v_a_dl", "v_b_lkh"]
    assert isinstance(bind(graphdef, params), LoRA)


@pytest.mark.slow
def test_magnitudes_are_the_norms_of_outputs_and_no_gradient_flows_through_the_norms():
    """DoRA by numpy; at first it is the inner layer."""
    cfg = LoRA.Config(
        inner=FeedForward.Config(dim=6, hidden=4, activation="relu"), match="up_*", rank=RANK, magnitudes=True
    )
    graphdef, params = initialise(cfg)
    weight, lora = np.asarray(params["inner"]["up_df"], np.float64), params["lora"]
    a, b, m = (np.asarray(lora[name], np.float64) for name in ("up_a_dl", "up_b_lf", "up_scale_f"))
    total = weight + 16.0 / RANK * a @ b
    share = m / np.linalg.norm(total, axis=0)
    against = np.random.default_rng(1).normal(size=weight.shape)

    def loss(lora: Any) -> jax.Array:
        return jnp.sum(against * plain_params(graphdef, {**params, "lora": lora})["up_df"])

    value, grads = jax.value_and_grad(loss)(lora)
    assert float(value) == pytest.approx(np.sum(against * total * share), rel=1e-5)
    np.testing.assert_allclose(grads["up_b_lf"], 16.0 / RANK * a.T @ (against * share), rtol=1e-4, atol=1e-5)
    expected = np.sum(against * total, axis=0) / np.linalg.norm(total, axis=0)
    np.testing.assert_allclose(grads["up_scale_f"], expected, rtol=1e-4, atol=1e-5)

    plain = plain_params(graphdef, params)
    wrapped: Any = WrapPlain.Config().build().convert(plain, jax.eval_shape(lambda: params))
    np.testing.assert_allclose(wrapped["lora"]["up_scale_f"], np.linalg.norm(plain["up_df"], axis=0), rtol=1e-6)
    np.testing.assert_allclose(plain_params(graphdef, wrapped)["up_df"], plain["up_df"], rtol=1e-6)
    built = cfg.build(rngs=nnx.Rngs(0))
    np.testing.assert_allclose(plain_params(*split(built))["up_df"], built.inner.up_df[...], rtol=1e-6)
    with pytest.raises(UserError, match="dropout: .*0 with magnitudes"):
        cfg.set(dropout=0.1).check_fields()


def feed_forward(separate: bool) -> tuple[Any, Any]:
    """A layer of two matrices with biases and random factors."""
    inner = FeedForward.Config(dim=16, hidden=24, activation="relu")
    graphdef, params = initialise(LoRA.Config(inner=inner, rank=RANK, separate=separate))
    rng = np.random.default_rng(1)
    return graphdef, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)


@pytest.mark.slow
def test_separate_products_have_the_gradients_that_numpy_makes_in_float64():
    graphdef, params = feed_forward(separate=True)
    rng, scale = np.random.default_rng(2), 16.0 / RANK
    x, against = (rng.normal(size=(4, 8, 16)) for _ in range(2))

    def loss(lora: Any, x: Any) -> jax.Array:
        return jnp.sum(against * bind(graphdef, {**params, "lora": lora})(x)[0])

    lora = params["lora"]
    value, (grads, of_x) = jax.value_and_grad(loss, (0, 1))(lora, jnp.asarray(x, jnp.float32))

    exact = {name: np.asarray(leaf, np.float64) for name, leaf in {**params["inner"], **lora}.items()}
    up = exact["up_df"] + scale * exact["up_a_dl"] @ exact["up_b_lf"]
    down = exact["down_fd"] + scale * exact["down_a_fl"] @ exact["down_b_ld"]
    before = x @ up + exact["up_bias_f"]
    hidden = np.maximum(before, 0)
    assert float(value) == pytest.approx(np.sum(against * (hidden @ down + exact["down_bias_d"])), rel=1e-5)
    of_down = np.einsum("btf,btd->fd", hidden, against)
    into = against @ down.T * (before > 0)
    of_up = np.einsum("btd,btf->df", x, into)
    expected = {
        "up_a_dl": scale * of_up @ exact["up_b_lf"].T,
        "up_b_lf": scale * exact["up_a_dl"].T @ of_up,
        "down_a_fl": scale * of_down @ exact["down_b_ld"].T,
        "down_b_ld": scale * exact["down_a_fl"].T @ of_down,
    }
    assert expected.keys() == grads.keys()
    for name, reference in expected.items():
        np.testing.assert_allclose(grads[name], reference, rtol=2e-5, atol=2e-5 * np.abs(reference).max())
    np.testing.assert_allclose(of_x, into @ up.T, rtol=2e-4, atol=2e-5 * np.abs(into @ up.T).max())


@pytest.mark.slow
def test_no_gradient_of_a_matrix_is_computed_where_products_are_separate():
    x, flops = jnp.ones((4, 64, 16)), []
    for separate in (False, True):
        graphdef, params = feed_forward(separate)
        loss = lambda lora, x: jnp.sum(bind(graphdef, {**params, "lora": lora})(x)[0] ** 2)  # noqa: B023, E731
        program = jax.jit(jax.grad(loss, (0, 1))).lower(params["lora"], x).compile()
        flops.append(program.cost_analysis()["flops"])  # pyright: ignore[reportOptionalSubscript]
    matrices, factors_of = 2 * 16 * 24, 2 * RANK * (16 + 24)  # numbers
    assert flops[0] >= 6 * 256 * matrices, "forward, by the inputs, by the sums"
    elementwise = 256 * 16 * 24
    assert flops[1] <= 4 * 256 * matrices + 6 * 256 * factors_of + elementwise, "without the last"


@pytest.mark.slow
def test_separate_products_are_those_of_an_engine_that_has_the_adapter_beside_its_base():
    """Every logit to the bit, in float32, of rows whose adapter is gathered from a bank and of rows trained."""
    cfg = small_decoder(num_layers=2)
    assert isinstance(cfg.block, Block.Config)
    for name in ("attention", "feed_forward"):
        cfg.block.set(**{name: LoRA.Config(inner=getattr(cfg.block, name), rank=4, separate=True)})
    graphdef, params = initialise(cfg)
    plain, adapter = plain_config(cfg), adapter_of(cfg, params)
    others = Adapter({path: Factors(-a, b) for path, (a, b) in adapter.factors.items()})
    built = build_abstract(plain)
    bank = [padded(one, dict(matrices(built)), adapter.rank) for one in (others, adapter)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *bank)
    inner = {name.replace("/inner/", "/"): leaf for name, leaf in flat(params).items() if "/lora/" not in name}
    base: dict[str, Any] = {}
    for name, leaf in inner.items():
        insert(base, name, jnp.asarray(leaf))
    batch = {name: jnp.asarray(x[:4]) for name, x in make_batch().items()}

    def logits(graphdef: Any, params: Any) -> jax.Array:
        model: Any = bind(graphdef, params)
        return model.logits(model.hidden(batch["tokens"], PackedContext(batch["positions"], batch["segment_ids"])).x)

    @jax.jit
    def drawn(base: Any, bank: Any, slots: Any) -> jax.Array:
        return logits(split(built)[0], adapted_rows(base, bank, slots, stacked=True))

    trained = np.asarray(jax.jit(lambda params: logits(graphdef, params))(params))
    first, second = (np.asarray(drawn(base, stacked, jnp.full(4, slot))) for slot in (0, 1))
    np.testing.assert_allclose(trained, second, rtol=0, atol=2e-4)  # equal bits on some processors
    assert np.abs(trained - first).max() > 0.1
