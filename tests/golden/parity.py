"""Relative differences between our models and those of Hugging Face transformers, family by family.

The reference was computed once (tests/golden/reference/parity.py) and is stored beside the tests, so measuring needs
a checkout of the project, and no torch. A difference is the largest absolute one over the spread of the reference.
"""

import dataclasses
import json
import re
import zlib
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.config import walk_configs
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.base import Params, bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.contexts.paged import RowContext
from axlearn_like.layers.decoder import Decoder
from mesh.errors import UserError, did_you_mean
from models.huggingface.architectures import Architecture, config_json, read_decoder
from models.huggingface.config_json import ConfigJson
from models.huggingface.convert import from_huggingface, to_huggingface
from rl.protocol.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler

GOLDEN = Path(__file__).parents[1] / "models" / "golden" / "parity"
EXPORTED = Path(__file__).parents[2] / "docs" / "figures" / "exported_models.json"  # by tests/golden/exported_models.py
PROMPT = 6  # tokens, of the sequence that the reference generated
DRAWS = 16  # at each of the last steps
LIMIT = 1e-4  # what every difference stays below

MEANINGS = {
    "logits": "packed, padded and long rows, beyond windows and the original length of a stretched rotary embedding",
    "gradient": "of the mean cross entropy: norms, and products with random signs, of each tensor",
    "decode": "logits of the last tokens, by transformers with its cache, ours by scoring",
    "greedy": "share of 200 tokens in which our engine's greedy decoding differs from `generate`",
    "engine": "log-probabilities at the same tokens, by our engine from the cache that its greedy decoding wrote",
    "export": "share of tensors that are not those imported, to the bit",
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """One model of transformers: a config, tensors, and what it computes."""

    name: str
    architecture: Architecture
    cfg: Decoder.Config
    tensors: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]

    def params(self) -> Params:
        """Return the parameters of our model."""
        return from_huggingface(self.tensors, self.cfg, self.architecture)

    @property
    def stretched(self) -> Decoder.Config:
        """The decoder with positions for every sequence of the reference, as a user would set them."""
        longest = 2 * len(self.arrays["generated"]) - PROMPT  # of an engine that draws behind any part of it
        cfg = self.cfg.clone()
        for _, rope in walk_configs(cfg):
            if isinstance(rope, Rope.Config) and rope.max_length is not None and rope.max_length < longest:
                rope.set(max_length=longest)
        return cfg


def names() -> list[str]:
    """Return the cases, in the order of their names.

    Raises:
        UserError: this is not a checkout of the project.
    """
    found = sorted(path.stem for path in GOLDEN.glob("*.npz"))
    if not found:
        raise UserError(f"no reference in {GOLDEN}: the golden files are in a checkout of the project")
    return found


def load(name: str) -> Reference:
    """Return a reference.

    Raises:
        UserError: there is none of that name.
    """
    path = GOLDEN / f"{name}.npz"
    if not path.exists():
        raise UserError(f"no reference {name!r}{did_you_mean(name, names())}")
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
    architecture, cfg = read_decoder(ConfigJson(json.loads(str(arrays.pop("config")))))
    weights = {key: arrays.pop(key) for key in list(arrays) if key.startswith("weights/")}
    tensors = {
        key.removeprefix("weights/"): (value.astype(np.uint32) << 16).view(np.float32) for key, value in weights.items()
    }
    return Reference(name, architecture, cfg.set(dtype="float32"), tensors, arrays)


def measure(reference: Reference) -> dict[str, float]:
    """Return the differences of a model, by property."""
    params = jax.tree.map(jnp.asarray, reference.params())
    graphdef, _ = split(build_abstract(reference.stretched))
    return {
        **_training(reference, graphdef, params),
        "decode": _decode(reference, graphdef, params),
        **_engine(reference, params),
        "export": _export(reference, params),
    }


def _training(reference: Reference, graphdef: Any, params: Params) -> dict[str, float]:
    """Logits of all rows, and the gradient of the cross entropy of the first, by one program."""
    arrays = reference.arrays
    context = PackedContext(jnp.asarray(arrays["positions"]), jnp.asarray(arrays["segment_ids"]))

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        logits = bind(graphdef, params)(jnp.asarray(arrays["tokens"]), context)
        targets = jnp.asarray(arrays["tokens"])[0, 1:]
        logprobs = jax.nn.log_softmax(logits[0, :-1])
        return -jnp.mean(jnp.take_along_axis(logprobs, targets[:, None], axis=-1)), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    found = np.asarray(logits)[arrays["checked"]]
    _require_same_choice(reference.name, found, arrays["logits"])
    theirs = to_huggingface(jax.device_get(gradients), reference.cfg, np.float64, reference.architecture)
    return {"logits": relative(found, arrays["logits"]), "gradient": _gradient(theirs, arrays)}


def _gradient(found: dict[str, np.ndarray], arrays: dict[str, np.ndarray]) -> float:
    worst = 0.0
    for key, expected in arrays.items():
        if key.startswith("gradient/"):
            name = key.removeprefix("gradient/")
            g = found[name].astype(np.float64)
            signs = np.random.default_rng(zlib.crc32(name.encode())).choice([-1.0, 1.0], (2, *g.shape))
            ours = np.array([np.linalg.norm(g), *(np.sum(g * sign) for sign in signs)])
            worst = max(worst, float(np.abs(ours - expected).max() / max(expected[0], 1e-6)))
    return worst


def _decode(reference: Reference, graphdef: Any, params: Params) -> float:
    tokens, expected = reference.arrays["generated"], reference.arrays["step_logits"]
    row = jnp.asarray(tokens[None, :-1])
    context = RowContext(jnp.arange(row.shape[1])[None])

    def last(params: Params) -> jax.Array:
        model = bind(graphdef, params)
        return model.logits(model.hidden(row, context).x[:, -len(expected) :])[0]

    return relative(np.asarray(jax.jit(last)(params)), expected)


def _engine(reference: Reference, params: Params) -> dict[str, float]:
    """Decode as `generate` did, in small pages, several steps a dispatch; then draw where the last steps began.

    A draw at temperature 1 continues from the pages that greedy decoding wrote, which the engine finds as a prefix, so
    that its log-probability is one of cached decoding.
    """
    tokens, logits = reference.arrays["generated"], reference.arrays["step_logits"]
    prompt, expected = tokens[:PROMPT], tokens[PROMPT:]
    greedy = Sampler.Config(temperature=0.0)
    engine = RolloutEngine.Config(
        model=reference.stretched,
        stop_tokens=(),
        max_prompt_tokens=len(tokens),
        max_new_tokens=len(expected),
        max_num_seqs=1,
        page_size=8,
        steps_per_dispatch=8,
        prefill_tokens=64,
        sampler=greedy,
    ).build()
    engine.set_weights(params, 1)
    stop = StopConditions(max_new_tokens=len(expected))
    (rollout,) = engine.generate([Request(Prompt(1, reference.name, prompt), stop=stop)])

    # All tokens stay, by the program for truncating samplers, which is that of greedy ones too.
    whole = Sampler.Config(top_k=logits.shape[-1])
    logprobs = np.asarray(jax.nn.log_softmax(logits.astype(np.float64)))
    worst = 0.0
    for step, row in enumerate(logprobs):
        known = Prompt(2 + step, reference.name, tokens[: len(tokens) - len(logits) + step])
        drawn = engine.generate([Request(known, samples=DRAWS, sampler=whole, stop=StopConditions(max_new_tokens=1))])
        worst = max(worst, *(abs(float(one.logprobs[0]) - row[one.tokens[0]]) for one in drawn))
    if engine.stats()["prefix_cache_hit_tokens"] < len(logits) * (len(tokens) - len(logits) - 8):
        raise UserError(f"{reference.name}: the engine computed keys and values again that it should have had cached")
    return {
        "greedy": float(np.mean(np.asarray(rollout.tokens) != expected)),
        "engine": float(worst / np.std(logits)),
    }


def _export(reference: Reference, params: Params) -> float:
    """Write tensors and config.json again; the config must describe the same model."""
    cfg, architecture = reference.cfg, reference.architecture
    written = config_json(cfg, architecture=architecture)
    if read_decoder(ConfigJson(written))[1] != cfg:
        return 1.0
    back = to_huggingface(jax.device_get(params), cfg, np.float32, architecture)
    theirs = {name: one for name, one in reference.tensors.items() if not architecture.may_have(name, ())}
    same = [name in back and name in theirs and np.array_equal(back[name], theirs[name]) for name in {*back, *theirs}]
    return 1 - sum(same) / len(same)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest absolute difference over the spread of what is expected."""
    return float(np.abs(found - expected).max() / np.std(expected))


def _require_same_choice(name: str, found: np.ndarray, expected: np.ndarray) -> None:
    different = int(np.sum(found.argmax(-1) != expected.argmax(-1)))
    if different:
        raise UserError(f"{name}: {different} of {len(found)} tokens have another largest logit than in transformers")


def page(found: dict[str, dict[str, float]], before: str = "") -> str:
    """Return the page of docs/reference that has these differences.

    Args:
        found: by case and property.
        before: the page as it was; rows of other cases are kept, and what follows the tables, which is written by hand.
    """
    measured = re.findall(r"^\| (\w+) \| (.*) \|$", before.partition("\n## ")[0], re.MULTILINE)
    rows = [[name, *cells.split(" | ")] for name, cells in measured if name in {*names()} - found.keys()]
    rows += [
        [name, *(f"{values[key]:.1e}" if values[key] else "0" for key in MEANINGS)] for name, values in found.items()
    ]
    exported = json.loads(EXPORTED.read_text(encoding="utf-8"))
    models = [
        [name, f"`{one['class']}`", f"{one['relative_difference']:.1e}", f"{one['same_top_1']:.0%}".replace("%", " %")]
        for name, one in exported["models"].items()
    ]
    return _PAGE.format(
        table=_table(["family", *MEANINGS], sorted(rows)),
        meanings="\n".join(f"* **{key}**: {meaning}" for key, meaning in MEANINGS.items()),
        exports=_table(["export", "class", "difference", "same top 1"], sorted(models)),
        date=exported["date"],
        **exported["versions"],
        by_hand=before.partition(_BY_HAND)[2] or "\n",
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


_BY_HAND = "<!-- What follows is written by hand. -->"
_PAGE = f"""# Families beside transformers

Written by `python -m tests.golden.parity --output docs/reference/parity.md`, in float32 on a CPU. For each family, and
for variants of its `config.json`, a tiny random model was saved by transformers 5.23 or 5.24
(`tests/golden/reference/cases.py`), with what it computes; here it is imported and computes the same.
Figures are the largest absolute difference over the
spread of the reference; the tests refuse any above 1e-4, and any token whose largest logit is another.

{{table}}

{{meanings}}

`llama` has Llama 3's rope scaling, `llama_linear`, `llama_dynamic`, `qwen2` (YaRN) and `llama_longrope_*` the others.
transformers rotates all tokens of a call by the base of the longest where the scaling is dynamic, so that its rows
beyond the original length differ from its own decoding; ours are those of decoding, and beyond that length only
decoding is compared. With LongRoPE it takes the short or the long factors in each call; ours are one or the other for
all sequences of a model, as `rope.max_length` says, and sequences that are longer are refused.

`*_biases`, `*_windows` and `*_dense` have biases of attention and of feed-forward networks, windows of some layers, and
dense layers before experts; `*_own_head` has a head that is not the embedding, and `*_predictors` has tensors of layers
that predict further tokens, which are left out.

## Our exports in transformers

The other way: small random models of ours, at least one for each architecture, exported in several files and loaded by
`from_pretrained`, which found every tensor that it wanted and no other. Texts of 17 and 48 tokens, the longer beyond
the windows and the original lengths; the largest difference over the largest logit, and the share of tokens with the
same most likely next one (`tests/golden/exported_models.py`, {{date}}, torch {{torch}}, transformers {{transformers}}):

{{exports}}

`qwen3_reward` is a reward model, a sequence classifier with one label. The same script compares any other export
(`logits DIRECTORY FILE.npz`, then `compare`).

{_BY_HAND}{{by_hand}}"""


@click.command()
@click.argument("families", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The page to write; other rows stay.")
def main(families: tuple[str, ...], as_json: bool, output: Path | None) -> None:
    """Measure tiny models of each family (or of FAMILIES) against what transformers computed."""
    found: dict[str, dict[str, float]] = {}
    for name in families or names():
        found[name] = measure(load(name))
        if not as_json:
            click.echo(f"{name}: " + ", ".join(f"{key} {value:.1e}" for key, value in found[name].items()))
    if output:
        output.write_text(page(found, output.read_text("utf-8") if output.is_file() else ""), encoding="utf-8")
    if as_json:
        click.echo(json.dumps({"families": found, "limit": LIMIT}))


if __name__ == "__main__":
    main()
