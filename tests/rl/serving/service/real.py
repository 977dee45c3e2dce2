"""A service over a policy of a few thousand weights, as `axl service` makes it.

Run as a script, it is a process to be killed: `python -m tests.rl.serving.service.real FOLDER PORT`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.versions import SavedWeights, find_version
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from rl.rollout.engine import RolloutEngine
from rl.serving.policy import ServedModel
from rl.serving.server import listen
from rl.serving.service.wire.server import ServiceServer, ServiceSettings, make_service
from tests.rl.serving.service.wire.running import KEYS, Running, running
from tests.rl.tiny import PHRASES, tiny_params, tiny_policy

BASE = "tiny"
TOKENIZER = PhraseTokenizer.Config(phrases=PHRASES)
POLICY = tiny_policy(TOKENIZER.build().vocab_size)


def base_config() -> ServedModel.Config:
    """Return the base's config."""
    engine = RolloutEngine.Config(max_num_seqs=16, steps_per_dispatch=4)
    sizes: Any = {"max_prompt_tokens": 24, "max_new_tokens": 24}
    return ServedModel.Config(policy=POLICY, tokenizer=TOKENIZER, engine=engine, **sizes)


def base_weights(folder: Path) -> SavedWeights:
    """Save weights that are far enough from zero for a head to tell tokens apart."""
    checkpointer = Checkpointer.Config().build(directory=folder / "checkpoints" / "rl")
    params: Any = tiny_params(POLICY)
    checkpointer.save(2, {"params": params, "step": np.int32(2)}, {})
    checkpointer.close()
    return find_version(folder)


@contextmanager
def real_service(folder: Path, **changes: Any) -> Iterator[Running]:
    """Serve until the end of the block; `changes` are fields of the server's config."""
    experiment = base_config().build()
    settings = ServiceSettings(BASE, folder / "state", slots=8, rank=4)
    service = make_service(experiment, base_weights(folder / "base"), settings)
    with running(service, experiment.tokenizer, **changes) as served:
        yield served


def main(folder: str, port: int) -> None:
    """Serve on a port until killed, by the weights of `base` in a folder."""
    experiment = base_config().build()
    settings = ServiceSettings(BASE, Path(folder) / "state", slots=8, rank=4)
    service = make_service(experiment, find_version(Path(folder) / "base"), settings)
    server = ServiceServer.Config().build(service=service, keys=KEYS)
    with listen("127.0.0.1", port) as listener:
        server.start(listener)
        print("ready", flush=True)
        server.wait(lambda: False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
