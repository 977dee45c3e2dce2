"""How a model is trained on a machine: what of it, mesh, rows at a time and engines, by what fits (`recipes.fit`)."""

from typing import Any

from axlearn_like.layers.wrappers.quantised import StoredWeights
from axlearn_like.learner import AdamW, Learner, WarmupLinear
from experiments.recipes.apply import learner_fields
from experiments.recipes.fit import Fit, fit
from experiments.recipes.machines import Machine
from experiments.recipes.sizes import ADAPTED, CHUNKS, FULL, METHODS, Method
from experiments.start.base import BaseModel
from experiments.start.options import StartOptions
from experiments.start.plan import Plan
from mesh.errors import UserError
from rl.fleet.fleet import Fleet
from rl.rollout.engine import RolloutEngine
from rl.training.packing import Packing
from rl.training.trainer import PolicyTrainer

_METHODS: dict[bool | None, tuple[Method, ...]] = {None: METHODS, True: ADAPTED, False: FULL}
_TRAINED: dict[Method, str] = {
    "full": "all parameters",
    "bfloat16 moments": "all parameters, moments in bfloat16",
    "lora": "LoRA factors",
    "int8 lora": "LoRA factors on an int8 base",
}


def choose_fit(
    job: str, options: StartOptions, model: BaseModel, devices: Machine | Fleet, plan: Plan, sizes: tuple[int, int, int]
) -> Fit:
    """Note and return how the model is trained: all parameters if they fit, else LoRA factors, or as `options` say.

    Args:
        job: sft, dpo or rl.
        options: those of the start.
        model: the model.
        devices: the machine, or the roles' devices.
        plan: gets the entries.
        sizes: tokens of a prompt, tokens of an answer, and rows or rollouts of an update.

    Raises:
        UserError: nothing fits; it says what would, with numbers.
    """
    prompt, answer, rows = sizes
    where = "this machine" if isinstance(devices, Machine) else f"--fleet {options.fleet}"
    try:
        found = fit(
            model.policy,
            "rl" if job == "rl" else "sft",
            devices,
            prompt_tokens=prompt,
            answer_tokens=answer,
            rows=rows,
            methods=_METHODS[options.lora],
            copies=int(job == "dpo"),
        )
    except UserError as error:
        raise UserError(f"--model {model.path} is too large for {where}: {error}") from error
    plan.say("trained", found.method, found.why, _TRAINED[found.method])
    if isinstance(devices, Machine) and found.engines is not None and found.engines.devices != "trainer":
        plan.say("fleet", found.fleet, "half of the devices draw, half train, each role in a process of its own")
    if found.seconds is not None:
        plan.say("seconds a step", round(found.seconds, 1), "predicted from the devices' peaks, not measured")
    return found


def mesh_of(found: Fit, *, small: bool) -> dict[str, int]:
    """Return the trainer's mesh; a small model is not sharded over a CPU's devices, of which each has a copy."""
    return {"data": -1} if small and found.machine.platform == "cpu" else found.mesh


def learner(found: Fit, rate: float, steps: int, *, warmup: int, end: float) -> Learner.Config:
    """Return AdamW with warm-up, of all parameters or of LoRA factors alone."""
    schedule = WarmupLinear.Config(peak_lr=rate, warmup_steps=min(warmup, steps - 1), total_steps=steps, end_lr=end)
    return Learner.Config(optimizer=AdamW.Config(b2=0.99), schedule=schedule, **learner_fields(found.method))


def trainer(found: Fit, *, small: bool, **fields: Any) -> PolicyTrainer.Config:
    """Return the trainer of RL; of a small model all rollouts of an update are one batch of padded rows."""
    if small:
        return PolicyTrainer.Config(mesh=mesh_of(found, small=True), row_multiple=found.machine.count, **fields)
    prompts, answers = found.packing or (None, 0)
    packing = Packing.Config(prompts=prompts, lengths=(answers,) if answers else (), rows=found.rows_at_once)
    fields |= {"packing": packing, "row_multiple": found.rows, "chunks": CHUNKS["rl"]}
    return PolicyTrainer.Config(mesh=mesh_of(found, small=False), **fields)


def engine(found: Fit, sequences: int) -> RolloutEngine.Config:
    """Return the engine: its mesh, and as many sequences at a time as fit."""
    engines = found.engines
    assert engines is not None, "jobs of RL have engines"
    return RolloutEngine.Config(
        max_num_seqs=min(sequences, engines.sequences),
        keep_completions=False,
        mesh={} if found.machine.platform == "cpu" else engines.mesh,
        weights=StoredWeights.Config() if engines.int8 else None,
    )
