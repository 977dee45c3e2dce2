"""Hidden states and head of a reference policy, by which an update takes the divergence of whole distributions.

A number for each token does for an estimate by the token that was drawn. The exact KL is a sum over all words, which
the update takes tile by tile of both policies (kernels/policy_head): so the reference's forward pass, without its head,
is made before the update, and its states go into that, with the matrix of its head, in place of logits.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from axlearn_like.config import ConfigBase
from axlearn_like.layers.base import Params, bind, split
from axlearn_like.training.alignment.reference import Reference
from axlearn_like.training.program import describe_params
from axlearn_like.training.step import SHARED
from mesh import to_named_sharding
from mesh.programs.shared import shared_program
from rl.training.scoring.update_logprobs import REFERENCE_HEAD, REFERENCE_STATES, hidden_states, scored_arrays


class DescribedPolicy(NamedTuple):
    """Graph definition and described parameters of a reference; `another_model`: its layers are not the policy's."""

    graphdef: nnx.GraphDef[Any]
    params: Params
    another_model: bool

    def states(self, chunks: int) -> "ReferenceStates":
        """Return what an update reads of it; `chunks`: as of the update."""
        return ReferenceStates(self.graphdef, chunks, routed=not self.another_model)


def describe_policy(model: ConfigBase, reference: Reference.Config, mesh: Mesh) -> DescribedPolicy:
    """Return a reference of a policy, on the mesh in force (UserError: it does not fit)."""
    own: nnx.GraphDef[Any]
    own, params, _ = describe_params(model, mesh, "policy")
    built = reference.build(frozen=())
    if (other := built.graphdef) is None:
        return DescribedPolicy(own, params, another_model=False)
    (params,) = built.memory(params).values()
    return DescribedPolicy(other, params, another_model=True)


def head_graph(policy: DescribedPolicy) -> nnx.GraphDef[Any]:
    """Return the graph definition of its output layer; pure."""
    return split(bind(policy.graphdef, policy.params).output)[0]


class ReferenceStates:
    """The arrays of a batch by which the update compares whole distributions with a reference's."""

    def __init__(self, graphdef: nnx.GraphDef[Any], chunks: int, *, routed: bool):
        """Make the program of the states; `routed`: by the recorded experts; `chunks`: as of the update."""
        self._graphdef, self._routed = graphdef, routed

        def states(params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
            return hidden_states(bind(graphdef, params), batch, chunks)

        self.states: Any = shared_program(("states", graphdef, chunks), lambda: jax.jit(states))
        self._copied: Any = jax.jit(jnp.copy)

    def head(self, params: Params, policy: Params) -> Params:
        """Return the parameters of the output layer; those that are the policy's are copied: updates donate them."""
        own = {id(leaf) for leaf in jax.tree.leaves(policy)}
        found = split(bind(self._graphdef, params).output)[1]
        return jax.tree.map(lambda leaf: self._copied(leaf) if id(leaf) in own else leaf, found)

    def arrays(self, params: Params, head: Params, batch: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Return the arrays for a batch on the devices."""
        states = self.states(params, self.read(batch))
        return {REFERENCE_STATES: states, SHARED: {REFERENCE_HEAD: head}}

    def read(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays of a batch, or of a described one, that `states` reads."""
        return scored_arrays(batch, routed=self._routed)

    def describe(self, params: Params, batch: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
        """Return the arrays for a described batch."""
        head = split(bind(self._graphdef, params).output)[1]
        states = to_named_sharding(jax.eval_shape(self.states, params, self.read(batch)), mesh)
        return {REFERENCE_STATES: states, SHARED: {REFERENCE_HEAD: head}}
