"""An RL experiment as its parts see it: what they need of it, place and compile, without knowing its class."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # imports jax
    from mesh.cost.program import Programs


class ExperimentFields(Protocol):
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
    graph: Any
    demonstrations: Any
    staleness: int
    warm_start: Any
    objective: Any
    sampler: Any
    trainer: Any
    controller: Any
    engine: Any
    parameter_server: Any
    verifier: Any
    fleet: Any
    alarms: Any
    workers: int
    standby: dict[str, int]

    def require(self, field: str, fits: bool, expected: str) -> None:
        """Raise a ConfigError that names the field unless it fits."""
        ...


@runtime_checkable
class Feature(Protocol):
    """A config within an experiment that needs something of the other parts.

    `RLExperiment.Config.check_fields` asks every config of its tree that has this method.
    """

    def check_set(self) -> None:
        """Refuse fields that are REQUIRED and not set (ConfigError)."""
        ...

    def requires(self, experiment: ExperimentFields) -> None:
        """Refuse, by `require` of the config whose field it is, what does not fit this one (ConfigError)."""
        ...


class ExperimentConfig(ExperimentFields, Protocol):
    """The config of an RL experiment: its fields, and what is made of them."""

    def build(self) -> "Experiment":
        """Make the experiment; nothing is allocated."""
        ...

    def programs(self, devices: Sequence[Any]) -> "Programs":
        """Describe what the experiment can run on these devices."""
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
