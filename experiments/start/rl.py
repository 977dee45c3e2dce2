"""Reinforcement learning from a model's directory, a file of rows, and a reward, if there is one."""

import os
from pathlib import Path

from axlearn_like.checkpoint.checkpointer import Checkpointer
from experiments.recipes.machines import Machine, find_machine
from experiments.recipes.sizes import ADAPTED
from experiments.start.base import BaseModel
from experiments.start.fitting import choose_fit, engine, learner, trainer
from experiments.start.options import StartOptions
from experiments.start.plan import SMALL, Plan, Start, rounded
from experiments.start.problems import Problems
from experiments.start.rewards import choose_scorer
from mesh.errors import UserError
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.fleet.fleet import Fleet
from rl.objective import TruncatedImportance
from rl.objective.presets import grpo
from rl.verification.service import Verifier

SAMPLES = 8  # default of TRL's num_generations
_ANSWER_TOKENS = 256  # default of TRL's max_completion_length
_EVALUATED = 256  # held-out problems at most


def plan_rl(options: StartOptions, machine: Machine) -> Start:
    """Derive the experiment of `start_rl`, with the plan that says from what (UserError: it does not fit)."""
    if options.pairs:
        raise UserError("--pairs is an option of `axl train`, which learns pairs by DPO; `axl rl` reads prompts")
    model, plan = BaseModel.read(options.path("model")), Plan()
    plan.say("--model", f"{model.path.name}, {model.parameters / 1e6:,.2f} M parameters", str(model.path))
    problems = Problems.read(options, model, plan)
    scorer = choose_scorer(options.reward, problems, plan)
    fleet = None if options.fleet is None else Fleet.Config().edited(options.fleet)
    if fleet is not None:
        machine = find_machine(fleet.build().trainer, "fleet.trainer")
    whose = "this machine" if fleet is None else f"the trainer of --fleet {options.fleet}"
    plan.say("devices", machine.text, f"{whose}: {machine.memory / 1e9:.1f} GB of each for programs")
    small = model.parameters < SMALL
    prompt_tokens, new_tokens = _lengths(model, problems, plan, least=16 if small else _ANSWER_TOKENS)
    prompts = min(16 if machine.platform == "cpu" else 32, 1 << (problems.trained.bit_length() - 1))
    plan.say("prompts_per_step", prompts, f"{problems.trained} rows; 32 on accelerators, 16 on a CPU")
    plan.say("samples_per_prompt", SAMPLES, "as TRL's num_generations")
    devices = machine if fleet is None else fleet.build()
    found = choose_fit("rl", options, model, devices, plan, (prompt_tokens, new_tokens, prompts * SAMPLES))
    steps = options.steps or (400 if small else min(400, max(100, 2 * problems.trained // prompts)))
    passes = f"{steps * prompts / problems.trained:.1f} passes over the rows"
    plan.say("num_steps", steps, f"--steps; {passes}" if options.steps else passes)
    rate = plan.rate("rl", model.parameters, lora=found.method in ADAPTED)
    every = max(1, min(50, steps // 4))
    plan.say("trainer.checkpoint.save_every", every, "a quarter of the updates, at most 50")
    held = min(_EVALUATED, problems.heldout)
    plan.say("evaluation.problems_per_family", held, f"held-out prompts, {SAMPLES} answers each, before and after")
    objective = grpo().set(old_policy="current")
    if found.engines is not None and found.engines.int8:
        objective.importance = TruncatedImportance.Config(cap=2.0)  # engines round the weights
    config = RLExperiment.Config(
        policy=model.trained(found.method, **plan.activations("policy", found, small=small)),
        tokenizer=model.tokenizer,
        tasks=problems.tasks,
        objective=objective,
        learner=learner(found, rate, steps, warmup=10, end=rate),
        trainer=trainer(found, small=small, checkpoint=Checkpointer.Config(save_every=every, keep=2)),
        engine=engine(found, prompts * SAMPLES),
        verifier=Verifier.Config(scorer=scorer, processes=min(4, max(1, (os.cpu_count() or 2) // 2))),
        evaluation=Evaluation.Config(problems_per_family=held, ks=(1, SAMPLES // 2)) if held else None,
        max_prompt_tokens=prompt_tokens,
        max_new_tokens=new_tokens,
        num_steps=steps,
        prompts_per_step=prompts,
        samples_per_prompt=SAMPLES,
        seed=options.seed,
    )
    inprocess = found.engines is None or found.engines.devices == "trainer"
    if fleet is not None:
        config.fleet = fleet
    elif not inprocess and found.fleet is not None:
        config.fleet = config.fleet.edited(found.fleet)
    about = f"GRPO of {model.path.name} on the rows of {Path(options.path('data')).name}"
    return Start(config, plan, problems.examples(), about, model.path, inprocess)


def _lengths(model: BaseModel, problems: Problems, plan: Plan, *, least: int) -> tuple[int, int]:
    """Note and return the limits of a prompt's and an answer's tokens (UserError: no prompt fits the model)."""
    longest = max(problems.prompt_lengths)
    answer = 2 * max(problems.answer_lengths, default=0)
    context = model.context or 2 * (longest + max(least, answer))
    half = context // 2
    fitting = [length for length in problems.prompt_lengths if length < half]
    if len(fitting) <= len(problems.prompt_lengths) // 2:
        raise UserError(
            f"--data {problems.files}: more than half of its prompts have {half} tokens or more (longest: {longest}), "
            f"and {model.path.name} knows {context} positions, an answer's included; expected shorter prompts, or a "
            "model of a longer context"
        )
    left = len(problems.prompt_lengths) - len(fitting)
    why = f"longest of {len(problems.prompt_lengths)} prompts: {longest} tokens"
    why += f"; {left} beyond half of the model's {context} positions are left out" if left else ""
    prompt = plan.say("max_prompt_tokens", min(rounded(max(fitting)), half), why)
    source = "as TRL" if least == _ANSWER_TOKENS else "for a small model"
    why = f"twice the longest answer ({answer // 2}), at least {least} {source}, within the model's {context} positions"
    return prompt, plan.say("max_new_tokens", min(max(least, rounded(answer)), context - prompt), why)
