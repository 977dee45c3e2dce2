"""The resolved config: the tree with the values that parents filled in when they built.

with record_resolved() as resolved:
    cfg.build(rngs=rngs)
print(to_text(resolved.config))
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from axlearn_like.config.base import ConfigBase, on_built
from axlearn_like.config.edit import set_path, walk_configs
from axlearn_like.config.fields import REQUIRED
from axlearn_like.config.tree import config_items, label, path_of


class Resolved:
    """The configs that were built, in the order in which they were finished: children before their parents."""

    def __init__(self) -> None:
        self.built: list[tuple[str, ConfigBase[Any]]] = []

    @property
    def config(self) -> ConfigBase[Any]:
        """The config of the object built last, with each of its children as it was built.

        A child built several times (one config, many layers) shows its last values; one that was
        never built is as it was declared.

        Raises:
            LookupError: when nothing was built.
        """
        if not self.built:
            raise LookupError("nothing was built inside record_resolved()")
        root_path, root = self.built[-1]
        root = root.clone()
        for path, cfg in sorted(self.built, key=lambda entry: entry[0].count(".") + entry[0].count("[")):
            below = path.removeprefix(root_path)
            if below != path and below.startswith("."):
                set_path(root, below.removeprefix("."), cfg.clone())
        return root


@contextmanager
def record_resolved() -> Generator[Resolved]:
    """Record every `build` of this thread inside the `with`."""
    resolved = Resolved()
    token = on_built.set(lambda path, cfg: resolved.built.append((path, cfg)))
    try:
        yield resolved
    finally:
        on_built.reset(token)


def check_values(cfg: ConfigBase[Any]) -> None:
    """Run `check_fields` of every config of a tree, from the top down, that has no field left to set.

    `ConfigBase.check` goes on to what only the machine that runs it can say, such as devices and files.

    Raises:
        ConfigError: names the field by its path, what was expected, and what it is.
    """
    label(cfg, path_of(cfg))
    for _, node in walk_configs(cfg):
        if all(value is not REQUIRED for _, value in config_items(node)):
            node.check_fields()


def resolve(cfg: ConfigBase[Any], build: Callable[[ConfigBase[Any]], Any] | None = None) -> ConfigBase[Any]:
    """Build `cfg` and return its resolved config.

    Args:
        cfg: what to build; it is not changed.
        build: how, plain `cfg.build()` by default. To make no arrays, pass `layers.base.build_abstract`.
    """
    with record_resolved() as resolved:
        if build is None:
            cfg.build()
        else:
            build(cfg)
    return resolved.config
