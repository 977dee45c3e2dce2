"""A fit as edits of an experiment, and the fit of an experiment that has no mesh rule for its devices."""

from typing import Any

from axlearn_like.checkpoint.convert import WrapPlain
from axlearn_like.config import ConfigBase, ConfigError, walk_configs, with_mesh_rules
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.layers.wrappers.quantised import StoredWeights
from axlearn_like.learner import BFloat16State, ParameterGroup
from experiments.recipes.device_rules import compiler_options
from experiments.recipes.fit import Fit, Method, fit
from experiments.recipes.recipes import recipes
from experiments.recipes.sizes import ADAPTED, with_adapters
from mesh.errors import UserError
from rl.experiment import RLExperiment
from rl.training.packing import Packing

_LORA_RATE = (
    10  # learning rates of factors, of those of full parameters (Schulman and others 2025, "LoRA Without Regret")
)


def apply_layout(found: Fit, cfg: Any) -> None:
    """Change how an experiment runs in place, and nothing of its result: mesh, rows at a time, remat."""
    rl = found.job == "rl"
    trainer = cfg.trainer if rl else cfg
    (cfg.policy if rl else cfg.model).set(remat=found.remat)
    trainer.set(mesh=found.mesh, compiler_options=compiler_options(found.machine.name.rpartition("-")[0]))
    if not rl:
        trainer.microbatches = found.accumulation
    elif trainer.packing is not None:
        trainer.packing.rows = found.rows_at_once
    if found.engines is not None and not cfg.engine.mesh:
        cfg.engine.mesh = found.engines.mesh
    cfg.mesh_rules = ()


def apply_fit(found: Fit, cfg: Any) -> None:
    """Change an experiment in place to what fits: what is trained and how, rows of a step, layout, engines."""
    rl, learner = found.job == "rl", cfg.learner
    learner.set(**learner_fields(found.method))
    if found.method in ADAPTED:
        with_adapters(cfg.policy if rl else cfg.model, int8=found.method == "int8 lora")
        learner.schedule.set(peak_lr=_LORA_RATE * learner.schedule.peak_lr, end_lr=_LORA_RATE * learner.schedule.end_lr)
        if cfg.start_from is not None:
            cfg.start_from.conversions = (WrapPlain.Config(),)
    if rl:
        _apply_rollouts(found, cfg)
    else:
        cfg.input.batch_size = found.rows
    apply_layout(found, cfg)


def learner_fields(method: Method) -> dict[str, Any]:
    """Return the fields of a learner that a method sets: frozen parameters, storage of moments."""
    if method in ADAPTED:
        return {"groups": (ParameterGroup.Config(match="*/lora/*"), ParameterGroup.Config(frozen=True))}
    return {"state_storage": (BFloat16State.Config(),)} if method == "bfloat16 moments" else {}


def _apply_rollouts(found: Fit, cfg: RLExperiment.Config) -> None:
    cfg.prompts_per_step = found.rows // cfg.samples_per_prompt
    cfg.trainer.row_multiple = found.rows
    if found.packing is None:
        cfg.trainer.set(packing=None, samples_per_row=1, microbatches=found.accumulation)
    else:
        prompts, longest = found.packing
        cfg.trainer.packing = Packing.Config(lengths=(longest, longest // 2, longest // 4), prompts=prompts)
        if longest // 2 < cfg.max_new_tokens:
            cfg.trainer.packing.lengths = (longest,)
    if found.engines is not None:
        weights = StoredWeights.Config() if found.engines.int8 else None
        cfg.engine.set(mesh=found.engines.mesh, max_num_seqs=found.engines.sequences, weights=weights)


def fitted[C: ConfigBase[Any]](cfg: C, name: str | None, devices: Any, device: str, edited: ConfigBase[Any]) -> C:
    """Return a copy of an experiment for its devices: a recipe as it fits them, another as its rules or the layout say.

    Args:
        cfg: the experiment, without the edits of a command line.
        name: its name; that of a recipe says what may change.
        devices: what `fit` takes: the machine, or the built fleet.
        device: name of the trainer's devices, which mesh rules match.
        edited: the experiment with the edits, by which its sizes are judged.

    Raises:
        UserError: nothing fits, with what would.
    """
    if (recipe := recipes().get(name or "")) is not None:
        made = cfg.clone()
        apply_fit(recipe.fit(devices), made)
        return made
    try:
        with_mesh_rules(cfg, device)
    except ConfigError as refused:
        if "has no mesh rule for" not in str(refused):
            raise
        made = cfg.clone()
        apply_layout(_layout(edited, devices, str(refused)), made)
        return made
    return cfg


def _layout(cfg: Any, devices: Any, refused: str) -> Fit:
    """Return the fit of an experiment as it is."""
    rl = isinstance(cfg, RLExperiment.Config)
    model: Any = cfg.policy if rl else cfg.model
    lora = [part for _, part in walk_configs(model) if isinstance(part, LoRA.Config)]
    stored = any(isinstance(one, BFloat16State.Config) for one in cfg.learner.state_storage)
    method: Method = "bfloat16 moments" if stored else "full"
    if lora:
        method = "int8 lora" if all(one.base for one in lora) else "lora"
    lengths = (cfg.max_prompt_tokens, cfg.max_new_tokens) if rl else (cfg.input.seq_len, 0)
    rows = cfg.prompts_per_step * cfg.samples_per_prompt if rl else cfg.input.batch_size
    sizes: dict[str, Any] = {"prompt_tokens": lengths[0], "answer_tokens": lengths[1], "rows": rows}
    try:
        return fit(plain_config(model), "rl" if rl else "sft", devices, methods=(method,), **sizes)
    except UserError as error:
        raise UserError(f"{refused}, and none can be computed: {error}") from None
