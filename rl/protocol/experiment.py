"""An RL experiment as its parts see it: what they state of it, place and compile, without knowing its class."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # it imports jax
    from mesh.cost.program import Programs


class ExperimentConfig(Protocol):
    """The fields of an RL experiment's config."""

    policy: Any
    tasks: Any
    max_prompt_tokens: int
    max_new_tokens: int
    stop_at_eos: bool
    prompts_per_step: int
    samples_per_prompt: int
    branching: Any
    interruption: Any
    demonstrations: Any
    staleness: int
    warm_start: Any
    objective: Any
    sampler: Any
    trainer: Any
    engine: Any
    parameter_server: Any
    verifier: Any
    fleet: Any
    alarms: Any
    workers: int

    def build(self) -> "Experiment":
        """Make the experiment; nothing is allocated."""
        ...

    def programs(self, devices: Sequence[Any]) -> "Programs":
        """Describe what the experiment can run on these devices."""
        ...

    def require(self, field: str, fits: bool, expected: str) -> None:
        """Raise a ConfigError that names the field unless it fits."""
        ...


class Experiment(Protocol):
    """An RL experiment whose parts' configs are complete."""

    @property
    def cfg(self) -> ExperimentConfig:
        """The config of the whole."""
        ...

    @property
    def trainer_cfg(self) -> Any:
        """The config of the policy trainer."""
        ...

    @property
    def engine_cfg(self) -> Any:
        """The config of the rollout engine."""
        ...
