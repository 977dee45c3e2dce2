"""A service of a base: its weights are read once, for the engine and for the training slots."""

import dataclasses
from pathlib import Path

from axlearn_like.layers.wrappers.base import plain_config
from mesh import UserError, make_mesh
from rl.experiment import RLExperiment
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.serving.policy import SavedWeights, ServedModel, load_params
from rl.serving.service.messages import BaseFacts
from rl.serving.service.row_batches import SlotLimits
from rl.serving.service.service import AdapterService
from rl.serving.service.slots import TrainingSlots

_FEWEST = 512  # tokens of a training program


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings of a service.

    Attributes:
        name: name of the base, as clients give it.
        state: directory of saved adapters and accepted requests.
        slots: adapters that are trained, and that are in the engine, at a time.
        rank: largest rank of an adapter.
        tokenizer: directory of the base's tokenizer in Hugging Face's form; None: it has none.
    """

    name: str
    state: Path
    slots: int = 32
    rank: int = 32
    tokenizer: str | None = None


def make_service(
    experiment: RLExperiment | ServedModel, weights: SavedWeights | None, settings: ServiceSettings
) -> AdapterService:
    """Return a service of an experiment's policy with weights (None: those that it begins with), both threads started.

    Raises:
        UserError: the policy has adapters of its own, or no matrix that can be adapted.
    """
    policy = experiment.cfg.policy
    if plain_config(policy) != policy:
        raise UserError(f"{settings.name}: a base with adapters of its own; merge them first, see axl convert export")
    length = experiment.cfg.max_prompt_tokens + experiment.cfg.max_new_tokens
    limits = SlotLimits(slots=settings.slots, rank=settings.rank, context_length=length, tokens=max(_FEWEST, length))
    mesh = make_mesh(experiment.engine_cfg.mesh)
    params = load_params(experiment, weights, mesh)
    slots = TrainingSlots(policy, params, limits, mesh)
    room = AdapterLimits(settings.slots, settings.rank, tuple(slots.known))
    engine = experiment.make_engine(adapters=room, keep_completions=True)
    engine.set_weights(params, 0 if weights is None else weights.version)
    base = BaseFacts(settings.name, length, settings.rank, slots.vocab_size, engine.cfg.stop_tokens, settings.tokenizer)
    return AdapterService(base, engine, slots, settings.state)
