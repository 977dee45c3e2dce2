"""Lines that a new feature costs, as in table 2 of arXiv 2507.05411 (AXLearn): docs/concepts/modularity.md.

    python -m tests.studies.modularity [--json] [--variants] [--modifier FILE.py:FUNCTION ...]

Counted are lines that change in existing modules so that a feature works in N models with M variants of attention each.
A feature is a modifier: a function that edits any config. A combination costs nothing in existing modules if its model,
with the feature, builds and runs (on described arrays) from the sources as they are; else it is reported as failed,
never as a number.
"""

import dataclasses
import functools
import inspect
import io
import itertools
import json
import time
import tokenize
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase, diff, from_text, replace, to_text, walk_configs
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.norm import RMSNorm
from axlearn_like.layers.parameter_names import path_name
from experiments import modifiers, registry
from models.llama import llama
from models.moe import moe
from models.qwen import qwen

LINES = 10  # of a modifier, at most
Modifier = Callable[[ConfigBase[Any]], Any]
FEATURES: tuple[Modifier, ...] = (modifiers.no_positions, modifiers.experts, modifiers.low_rank, modifiers.int8)
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


# ---- lines


def code_lines(function: Callable[..., Any]) -> int:
    """Lines of a function with code on them, `def` included; without docstring, comments and blank lines."""
    lines: set[int] = set()
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(function)).readline):
        if token.type not in LAYOUT and not (token.type == tokenize.STRING and before == tokenize.INDENT):
            lines.update(range(token.start[0], token.end[0] + 1))
        before = token.type
    return len(lines)


# ---- models, on described arrays


@dataclasses.dataclass(frozen=True)
class Traced:
    """A model as it was built and traced.

    Attributes:
        tree: its parameters, described.
        hidden, logits: shapes of results for two rows of eight tokens.
        primitives: names of the operations of a forward pass.
        names: names of arrays that layers and kernels name.
        dtypes: dtypes of intermediate results.
    """

    tree: Any
    hidden: tuple[int, ...]
    logits: tuple[int, ...]
    primitives: frozenset[str]
    names: frozenset[str]
    dtypes: frozenset[str]

    @property
    def params(self) -> dict[str, tuple[int, ...]]:
        """Shapes by path."""
        return {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(self.tree)}


def models(cfg: ConfigBase[Any]) -> dict[str, Decoder.Config]:
    """The decoders in a config by path: the model of a trainer, the policy of an RL run, and that of its warm start."""
    return {path: node for path, node in walk_configs(cfg) if isinstance(node, Decoder.Config)}


@functools.cache
def trace(model: str) -> Traced:
    """Build a decoder, given as config text, and trace it on a packed batch; nothing is allocated."""
    cfg = from_text(model)
    graphdef, tree = split(build_abstract(cfg))
    integers = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def forward(params: Any, tokens: Any, positions: Any, segments: Any) -> Any:
        decoder = bind(graphdef, params)
        context = PackedContext(positions, segments)
        hidden = decoder.hidden(tokens, context).x
        return hidden, decoder.scores(hidden, context) if decoder.scoring else decoder.logits(hidden)

    jaxpr, (hidden, logits) = jax.make_jaxpr(forward, return_shape=True)(tree, *[integers] * 3)
    equations = list(_equations(jaxpr.jaxpr))
    return Traced(
        tree=tree,
        hidden=hidden.shape,
        logits=logits.shape,
        primitives=frozenset(equation.primitive.name for equation in equations),
        names=frozenset(equation.params["name"] for equation in equations if equation.primitive.name == "name"),
        dtypes=frozenset(str(var.aval.dtype) for equation in equations for var in equation.outvars),
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _equations(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


# ---- N models, M variants of attention


def _latent(attention: Attention.Config) -> ConfigBase[Any]:
    return LatentAttention.Config(num_heads=attention.num_heads, rope=attention.rope)


VARIANTS: Mapping[str, Callable[[Attention.Config], ConfigBase[Any]]] = {
    "as it is": lambda a: a,
    "multi-head": lambda a: a.set(num_kv_heads=None),
    "multi-query": lambda a: a.set(num_kv_heads=1),
    "biases": lambda a: a.set(qkv_bias=True),
    "norms of heads": lambda a: a.set(qk_norm=RMSNorm.Config()),
    "sliding window": lambda a: a.set(window=4),
    "soft cap": lambda a: a.set(soft_cap=50.0),
    "sinks": lambda a: a.set(sinks=True),
    "not causal": lambda a: a.set(causal=False),
    "latent": _latent,
}


def named_models() -> dict[str, Decoder.Config]:
    """Return the models of `models/` with configs of their own; of several names for one config, the first."""
    found = {name: family(name) for family in (llama, qwen, moe) for name in family.names if "Llama-2" not in name}
    distinct = {to_text(cfg): name for name, cfg in reversed(found.items())}
    return {name: found[name] for name in reversed(distinct.values())}


def experiments() -> dict[str, Callable[[], ConfigBase[Any]]]:
    """Return what makes the config of each registered experiment."""
    return {name: functools.partial(registry.get, name) for name in registry.entries()}


def variants() -> dict[str, Callable[[], ConfigBase[Any]]]:
    """Return what makes an experiment of each of N models with each of M variants of attention."""

    def make(model: Decoder.Config, change: Callable[[Attention.Config], ConfigBase[Any]]) -> ConfigBase[Any]:
        cfg: Any = registry.get("demo_sft")
        cfg.model = model.clone()
        replace(cfg, Attention.Config, change)
        return cfg

    found = itertools.product(named_models().items(), VARIANTS.items())
    return {f"{name}, {variant}": functools.partial(make, model, change) for (name, model), (variant, change) in found}


def count(features: tuple[Modifier, ...], cases: Mapping[str, Callable[[], ConfigBase[Any]]]) -> list[dict[str, Any]]:
    """A row for each feature: what it takes to have it in every case."""
    rows = []
    for feature in features:
        began, worked, changed, failed = time.process_time(), 0, 0, {}
        for name, make in cases.items():
            try:
                cfg, plain = make(), make()
                feature(cfg)
                for model in models(cfg).values():
                    trace(to_text(model))
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            worked += 1
            changed += len(diff(plain, cfg))
        rows.append(
            {
                "feature": feature.__name__,
                "modifier_lines": code_lines(feature),
                "cases": len(cases),
                "worked": worked,
                "failed": failed,
                "existing_lines_changed": None if failed else 0,
                "config_lines_it_changes": changed,
                "cpu_seconds": round(time.process_time() - began, 1),
            }
        )
    return rows


# ---- the command


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--variants", "over_variants", is_flag=True, help="Also over the models of models/ times ten variants of attention."
)
@click.option("--modifier", "more", multiple=True, metavar="FILE.py:FUNCTION", help="A feature of yours, too.")
def main(as_json: bool, over_variants: bool, more: tuple[str, ...]) -> None:
    """Count the lines that features cost."""
    features = (*FEATURES, *(registry.find(name) for name in more))
    result = {"experiments": count(features, experiments())}
    if over_variants:
        result["variants"] = count(features, variants())
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, rows in result.items():
        click.echo(f"over {name}")
        click.echo(_table(rows))
        for row in rows:
            for place, why in row["failed"].items():
                click.echo(f"{row['feature']} failed: {place}: {why}")


def _table(rows: list[dict[str, Any]]) -> str:
    names = [name for name in rows[0] if name != "failed"]
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    main()
