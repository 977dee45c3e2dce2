"""An engine with replicas of experts on four devices of a CPU, beside one without and one on a single device.

python -m tests.benches.experts.engines TOKENS
"""

import json
import sys
from typing import Any

import jax
import numpy as np
from flax import nnx

from axlearn_like.config import replace
from axlearn_like.layers.base import split
from axlearn_like.layers.moe.layer import MoE
from experiments.demo.config import demo_moe_sft
from rl.protocol.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.expert_slots import ExpertSlots
from rl.rollout.request import Request

_EXPONENT = 1.2  # exponent of Zipf's law, by which columns of routers are longer


def engines(tokens: int) -> dict[str, Any]:
    """Return the busiest device over the mean in a second version, and if tokens and log-probabilities are the same."""
    model: Any = demo_moe_sft(seed=0).model
    replace(model, MoE.Config, lambda moe: moe.set(record_routing=True))
    params = jax.tree_util.tree_map_with_path(_uneven, split(model.build(rngs=nnx.Rngs(0)))[1])
    drawn: dict[str, Any] = {}
    figures: dict[str, float] = {}
    for name, mesh, replicas in (
        ("alone", {}, None),
        ("without", {"expert": 4}, None),
        ("with", {"expert": 4}, ExpertSlots.Config(slots=1)),
    ):
        cfg = RolloutEngine.Config(model=model, stop_tokens=(), max_prompt_tokens=16, max_new_tokens=tokens, mesh=mesh)
        engine = cfg.set(max_num_seqs=32, page_size=8, replicas=replicas).build()
        for version in range(2):
            engine.set_weights(params, version)
            prompts = [Prompt(i, "bench", np.arange(i, i + 8, dtype=np.int32)) for i in range(8)]
            found = engine.generate([Request(prompt, samples=4, seed=version) for prompt in prompts])
            drawn[name] = [(one.tokens.tolist(), one.logprobs.tolist()) for one in found]
        stats = engine.stats()
        figures |= {f"engine_{key}": stats[key] for key in stats if key.startswith("busiest_to_mean")}
    return figures | {
        "engine_tokens": sum(len(tokens) for tokens, _ in drawn["with"]),
        "engine_identical": drawn["with"] == drawn["without"] == drawn["alone"],
    }


def _uneven(path: Any, leaf: Any) -> Any:
    if "router" not in jax.tree_util.keystr(path):
        return leaf
    return np.asarray(leaf) * (1 + 3 * np.arange(1, leaf.shape[-1] + 1) ** -_EXPONENT).astype(np.float32)


if __name__ == "__main__":
    print(json.dumps(engines(int(sys.argv[1]))))
