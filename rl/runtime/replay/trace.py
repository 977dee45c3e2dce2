"""The trace of an update: everything that it was made of, in the order in which it came about, as named arrays."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from flax import nnx
from jax import lax

from axlearn_like.kernels.exact.scope import use_numerics
from axlearn_like.layers.base import Params, bind
from axlearn_like.layers.contexts.paged import RowContext
from axlearn_like.layers.parameter_names import path_name
from axlearn_like.learner import Learner
from axlearn_like.training.step import State, Step
from mesh.errors import UserError
from mesh.rules import complete_rows, use_mesh
from rl.protocol.messages import Group
from rl.training.logprobs import fill_rows, row_length
from rl.training.trainer import PolicyTrainer

FORM = 1  # number of the form of files


@dataclasses.dataclass(frozen=True)
class UpdateTrace:
    """An update."""

    samples: list[tuple[int, int]]  # prompt and sample of each rollout, in the order of the batch
    arrays: dict[str, np.ndarray]  # arrays by name, whose first part is the stage: see `STAGES` of compare.py
    # Parameters before the update, by path; empty if the trace comes from a file
    before: dict[str, np.ndarray] = dataclasses.field(default_factory=dict[str, np.ndarray])
    # Figures as in a run's log, without times
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def write(self, path: Path, **about: Any) -> None:
        """Write it into a new file; `about`: what else is to be known of it, JSON-able."""
        known = {"form": FORM, "samples": self.samples, "metrics": dict(self.metrics), **about}
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, about=np.array(json.dumps(known)), **self.arrays)


def read_trace(path: Path) -> tuple[UpdateTrace, dict[str, Any]]:
    """Return the trace in a file, and what else is known of it (UserError: it is no trace)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
        assert about["form"] == FORM
        samples = [(int(prompt), int(sample)) for prompt, sample in about["samples"]]
        return UpdateTrace(samples, arrays, metrics=dict(about["metrics"])), about
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise UserError(f"{path} is no trace of an update ({error}); expected a file of axl replay --trace") from None


class Watch:
    """A look at the next update of a trainer."""

    def __init__(self, trainer: PolicyTrainer, *, deep: bool = False):
        """Look from now on; `deep`: at gradients and activations too, by programs of their own."""
        self._trainer, self._deep = trainer, deep
        self._found: dict[str, np.ndarray] = {}
        self._params: Any = None
        self._before: dict[str, np.ndarray] = {}
        trainer.watch(self._around)

    def trace(self, groups: Sequence[Group]) -> UpdateTrace:
        """Return the trace of the update that was made of these groups."""
        found = {**_of_groups(groups), **self._found}
        if self._deep:
            found |= layer_marks(self._trainer, self._params, groups)
        samples = [(group.prompt.id, rollout.sample_id) for group in groups for rollout in group.rollouts]
        return UpdateTrace(samples, found, self._before)

    def _around(self, step: Step) -> Step:
        def watched(state: State, inputs: Any) -> tuple[State, Any]:
            self._params = jax.tree.map(np.array, state["params"])
            self._before = _named(self._params)
            marks = {f"state/{name}": _digest(array) for name, array in _named(state).items()}
            rows = {f"batch/{name}": array for name, array in _named(_indexed(inputs)).items()}
            gradients = _named(self._gradients(state, inputs[0])) if self._deep and len(inputs) else {}
            state, metrics = step(state, inputs)
            after = {f"weights/{name}": array for name, array in _named(state["params"]).items()}
            figures = {name: np.asarray(value) for name, value in metrics.items()}
            loss = {"loss/loss": figures.pop("loss")}
            learned = {f"metrics/{name}": value for name, value in figures.items()}
            self._found = {**marks, **rows, **loss, **{f"gradient/{n}": g for n, g in gradients.items()}}
            self._found |= {**learned, **after}
            return state, metrics

        return watched

    def _gradients(self, state: State, minibatch: Any) -> Any:
        """Return the gradient of the first minibatch: its own program, with the update's forward and backward pass."""
        cfg = self._trainer.cfg
        own = {field.name: getattr(cfg.learner, field.name) for field in dataclasses.fields(Learner.Config)}
        cfg = cfg.clone(learner=GradientLearner.Config(**own))
        mesh = self._trainer.mesh
        with use_mesh(mesh, cfg.axis_rules):
            copied = jax.tree.map(lambda x: x.copy(), state)
            return cfg.program(mesh).step(copied, minibatch)[0]["params"]


class GradientLearner(Learner):
    """A learner whose new parameters are the gradients."""

    class Config(Learner.Config):
        pass

    def update(self, grads: Any, opt_state: dict[str, Any], params: Any) -> Any:
        """Return the gradients in the place of the new parameters, in their types; the rest as it is."""
        _, *others = super().update(grads, opt_state, params)
        return jax.tree.map(lambda grad, old: grad.astype(old.dtype), grads, params), *others


def _of_groups(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Return what was leased, drawn and scored."""
    found: dict[str, np.ndarray] = {
        "lease/prompts": np.array([group.prompt.id for group in groups]),
        "lease/draws": np.array([group.prompt.draw for group in groups]),
    }
    for g, group in enumerate(groups):
        found[f"prompt/{g:05}"] = group.prompt.tokens
        for n, rollout in enumerate(group.rollouts):
            where = f"{g:05}/{n:05}"
            found |= {f"tokens/{where}": rollout.tokens, f"logprobs/{where}": rollout.logprobs}
            found[f"versions/{where}"] = rollout.versions
        found[f"reward/{g:05}"] = np.array([score.reward for score in group.scores])
        found[f"status/{g:05}"] = np.array([score.status == "ok" for score in group.scores])
    return found


def _indexed(inputs: Sequence[Any]) -> dict[str, Any]:
    """Return the arrays of minibatches, and of their microbatches where rows are packed, by their numbers."""
    return {
        f"{m:03}": one if isinstance(one, Mapping) else {f"{i:03}": micro for i, micro in enumerate(one)}
        for m, one in enumerate(inputs)
    }


def _named(tree: Any) -> dict[str, np.ndarray]:
    """Return copies of the arrays of a tree by their paths: the next update may overwrite them."""
    return {path_name(path): np.array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _digest(array: np.ndarray) -> np.ndarray:
    return np.array(xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).tobytes()), np.uint64)


def layer_marks(trainer: PolicyTrainer, params: Params, groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Return "layers/marks", uint32 [rollouts, embedding and layers and logits, length], of a plain forward pass.

    A token's activations depend on those before it, so of rollouts that differ the common beginning can be compared.
    Empty for a policy that is no stack of layers.
    """
    cfg, graphdef = trainer.cfg, trainer.cfg.program(trainer.mesh).graphdef
    if not hasattr(bind(graphdef, params), "blocks"):
        return {}
    length = row_length(cfg.max_prompt_tokens, cfg.max_new_tokens)
    sequences = [(group.prompt.tokens, rollout.tokens) for group in groups for rollout in group.rollouts]
    marked = jax.jit(lambda params, tokens: _marks(graphdef, params, tokens))
    with use_mesh(trainer.mesh, cfg.axis_rules), complete_rows():
        found = [marked(params, fill_rows([one], 1, length)["tokens"]) for one in sequences]
    return {"layers/marks": np.stack([np.asarray(one) for one in found])}


def _marks(graphdef: nnx.GraphDef[Any], params: Params, tokens: jax.Array) -> jax.Array:
    model = bind(graphdef, params)
    context = RowContext(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    with use_numerics(model.numerics):
        x = model.embedding(tokens, model.dtype, context)
        marks = [_mark(x)]
        for layer in model.blocks():
            x, _, _ = layer(x, context, None)
            marks.append(_mark(x))
        marks.append(_mark(model.logits(model.norm(x))))
    return jnp.stack(marks)


def _mark(x: jax.Array) -> jax.Array:
    """[1, length, width] -> uint32 [length]: sums of the bits times odd numbers, which one changed element changes."""
    bits = lax.bitcast_convert_type(x[0], {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]).astype(jnp.uint32)
    weights = jnp.arange(x.shape[-1], dtype=jnp.uint32) * np.uint32(0x9E3779B2) | 1
    return jnp.sum(bits * weights, axis=-1, dtype=jnp.uint32)
