"""Teachers: other models as reference policies, whose parameters come from a run or from files."""

from collections.abc import Callable, Collection
from typing import Any, override

import jax
from flax import nnx

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.pretrained import pretrained_source
from axlearn_like.config import REQUIRED, ConfigBase, errors_at, path_of
from axlearn_like.layers.base import Params, build_abstract, split
from axlearn_like.training.alignment.reference import Reference
from mesh import to_named_sharding


class Teacher(Reference):
    """A model of any shape over the policy's tokens. Its parameters are read at every start; no checkpoint holds them.

    They are sharded over the policy's mesh, by the same rules.
    """

    class Config(Reference.Config):
        model: ConfigBase = REQUIRED
        start_from: StartFrom.Config | None = None  # weights of the teacher; None: the model's own, as of `hf(path)`

        @property
        @override
        def another_model(self) -> bool:
            return True

        @property
        def source(self) -> StartFrom.Config | None:
            """Source of the parameters."""
            return self.start_from or pretrained_source(self.model)

        @override
        def check_fields(self) -> None:
            expected = "StartFrom.Config(path=RUN), for the model has no parameters of its own as hf(path) has"
            self.require("start_from", self.source is not None, expected)

        @override
        def check_policy(self, model: ConfigBase, params: Params, frozen: Collection[str]) -> None:
            own, wanted = (getattr(one, "vocab_size", 0) for one in (self.model, model))
            fits = f"a model with vocab_size {wanted} or more, as its tokens are the policy's; it has {own}"
            self.require("model", own >= wanted, fits)
            abstract = _abstract(self)[1]
            assert self.source is not None, "checked above"
            with self.errors_in("start_from" if self.start_from is not None else "model"):
                self.source.build().check(abstract)

    def __init__(self, cfg: Config, *, frozen: Collection[str]):
        super().__init__(cfg, frozen=frozen)
        self._config, self._params = cfg, {}
        self.graphdef, self._abstract = _abstract(cfg)

    @override
    def start(self, params: Params) -> None:
        source, mesh = self._config.source, jax.sharding.get_mesh()
        assert source is not None, "checked with the config"
        self._params = source.build().params(to_named_sharding(self._abstract, mesh))

    @override
    def params(self, params: Params) -> Params:
        return self._params

    @override
    def alone(self, policy: Callable[[], Params]) -> Params:
        self.start({})
        return self._params

    @override
    def memory(self, params: Params) -> dict[str, Any]:
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # a plan's devices need not exist
            return {"teacher": to_named_sharding(_abstract(self._config)[1], mesh)}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self.start({})


def _abstract(cfg: Teacher.Config) -> tuple[nnx.GraphDef[Any], Params]:
    """Return the graph definition and described parameters of the teacher on the mesh that is set (UserError)."""
    with errors_at(f"{path_of(cfg)}.model", cfg.model):
        return split(build_abstract(cfg.model))
