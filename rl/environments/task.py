"""A task whose problems are solved in an environment: any source of problems, with one."""

from typing import Any, override

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from rl.environments.environment import Environment
from rl.tasks.source import ProblemSource


class EnvironmentTask(Configurable):
    """The problems of `source`, each an episode of `environment`. Train, held-out and scores are the source's."""

    class Config(ProblemSource.Config):
        source: ProblemSource.Config = REQUIRED
        environment: Environment.Config = REQUIRED

        @property
        @override
        def title(self) -> str:
            return self.label or self.source.title

    def __new__(cls, cfg: Config, *, seed: int) -> ProblemSource:
        """Return the source itself, which knows its environment from then on."""
        source: ProblemSource = cfg.source.clone(label=cfg.title, weight=cfg.weight).build(seed=seed)
        source.environment = cfg.environment
        return source


def environments_of(tasks: ConfigBase[Any]) -> list[Environment.Config]:
    """Return the environments that tasks name."""
    families = getattr(tasks, "families", ())
    return [family.environment for family in families if isinstance(family, EnvironmentTask.Config)]
