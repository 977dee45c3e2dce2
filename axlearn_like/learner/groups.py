"""Groups: parameters with their own rules, chosen by path and by kind."""

import fnmatch
from typing import Any, override

import jax
import jax.numpy as jnp
import optax

from axlearn_like.config import ConfigBase, Configurable, config_items, path_of, walk_configs
from axlearn_like.layers.parameter_names import KINDS, Kind, kind_of, path_name
from axlearn_like.learner.errors import LearnerError
from mesh.errors import did_you_mean

REST = "rest"


class ParameterGroup(Configurable):
    """The parameters whose path fits `match` and whose kind is one of `kinds`.

    Paths are as in checkpoints (`layers/attention/q_dkqh`); `*` matches anything, slashes too. A parameter belongs to
    the first group that it fits. Frozen parameters get no update, no decay and no optimizer state, and do not count in
    the gradient norm.

    >>> from axlearn_like.learner import ParameterGroup, Learner
    >>> frozen, rest = ParameterGroup.Config(match="embedding/*", frozen=True), ParameterGroup.Config(lr_scale=0.5)
    >>> cfg = Learner.Config(groups=(frozen, rest))
    >>> cfg.groups[0].build().fits("embedding/table_vd", 2)
    True
    """

    class Config(ConfigBase["ParameterGroup"]):
        match: str = "*"
        kinds: tuple[Kind, ...] = KINDS
        lr_scale: float = 1.0  # factor of the learning rate, and so of the decay
        weight_decay: float | None = None  # weight decay of the group; None: the optimizer's
        frozen: bool = False
        optimizer: ConfigBase | None = None  # optimizer of the group; None: the learner's

        @override
        def check_fields(self) -> None:
            self.require("match", bool(self.match), "a pattern such as '*embedding*'")
            self.require("kinds", bool(self.kinds), f"some of {', '.join(KINDS)}")
            self.require_least(0, "lr_scale")
            for field, default in {"optimizer": None, "weight_decay": None, "lr_scale": 1.0}.items():
                self.require(field, not self.frozen or getattr(self, field) == default, f"{default} in a frozen group")

    def __init__(self, cfg: Config):
        self.where, self.match, self.kinds, self.frozen = path_of(cfg), cfg.match, cfg.kinds, cfg.frozen
        self._cfg = cfg

    def fits(self, name: str, ndim: int) -> bool:
        """Return True if the parameter with this path and number of axes fits."""
        return fnmatch.fnmatchcase(name, self.match) and kind_of(name, ndim) in self.kinds

    def transformation(self, default: ConfigBase) -> optax.GradientTransformation:
        """Return the direction of the group's parameters, where `default` is the learner's optimizer."""
        if self.frozen:
            return optax.set_to_zero()
        optimizer = (self._cfg.optimizer or default).clone()
        if self._cfg.weight_decay is not None:
            _set_weight_decay(optimizer, self._cfg.weight_decay, self.where)
        scale = [] if self._cfg.lr_scale == 1.0 else [optax.scale(self._cfg.lr_scale)]
        return optax.chain(optimizer.build().transformation(), *scale)


class Groups:
    """All groups over one tree of parameters."""

    def __init__(self, groups: tuple[ParameterGroup, ...], default: ConfigBase):
        self._groups = groups
        parts = {_label(index): group.transformation(default) for index, group in enumerate(groups)}
        self.freezes = any(group.frozen for group in groups)
        self.transformation = optax.partition({**parts, REST: default.build().transformation()}, self.labels)

    def labels(self, params: Any) -> Any:
        """Return `group0`, `group1`, ... or `rest` for every parameter.

        Raises:
            LearnerError: a group has no parameters; the message has the nearest paths.
        """
        names: list[str] = []
        found: list[str] = []

        def label(path: tuple[Any, ...], leaf: jax.Array) -> str:
            name = path_name(path)
            names.append(name)
            fitting = (_label(i) for i, group in enumerate(self._groups) if group.fits(name, leaf.ndim))
            found.append(next(fitting, REST))
            return found[-1]

        labels = jax.tree_util.tree_map_with_path(label, params)
        for index, group in enumerate(self._groups):
            if _label(index) not in found:
                raise LearnerError(self._nothing(group, names))
        return labels

    def without_frozen(self, grads: Any) -> Any:
        """Return gradients with zeros for frozen parameters, which the compiler then does not compute."""
        frozen = {_label(index) for index, group in enumerate(self._groups) if group.frozen}
        zero = jnp.zeros_like
        return jax.tree.map(lambda g, label: zero(g) if label in frozen else g, grads, self.labels(grads))

    def trained(self, params: Any) -> Any:
        """Return the parameters with `optax.MaskedNode` for frozen ones."""
        frozen = {_label(index) for index, group in enumerate(self._groups) if group.frozen}
        return jax.tree.map(lambda p, label: optax.MaskedNode() if label in frozen else p, params, self.labels(params))

    def frozen(self, params: Any) -> frozenset[str]:
        """Return the paths of frozen parameters."""
        frozen = {_label(index) for index, group in enumerate(self._groups) if group.frozen}
        labels = jax.tree_util.tree_leaves_with_path(self.labels(params))
        return frozenset(path_name(path) for path, label in labels if label in frozen)

    def _nothing(self, group: ParameterGroup, names: list[str]) -> str:
        by_path = [name for name in names if fnmatch.fnmatchcase(name, group.match)]
        if not by_path:
            return f"{group.where}.match: {group.match!r} matches no parameter{did_you_mean(group.match, names)}"
        if group.kinds == KINDS:
            return f"{group.where}.match: all that {group.match!r} matches is in earlier groups: {', '.join(by_path)}"
        kinds = " or ".join(group.kinds)
        return f"{group.where}: of what {group.match!r} matches and no earlier group has, nothing is of kind {kinds}"


def _label(index: int) -> str:
    return f"group{index}"


def _set_weight_decay(optimizer: ConfigBase, value: float, group: str) -> None:
    """Set the weight decay of the optimizer and of those inside it (`others`)."""
    fields = [cfg for _, cfg in walk_configs(optimizer) if "weight_decay" in dict(config_items(cfg))]
    if not fields:
        raise LearnerError(f"{group}.weight_decay: {type(optimizer).__qualname__} has no weight decay; expected None")
    for cfg in fields:
        cfg.set(weight_decay=value)
