"""Answers of the small model to problems in words (docs/how-to/small-model.md).

python examples/complete_text.py runs/small_llama "Tom has 3 apples and buys 4 more. How many apples does he have?"
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.config import from_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.tokenizers.protocol import completion_text
from axlearn_like.training.trainer import Trainer
from experiments.small_llama import TOKENIZER
from rl.protocol.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.rollout.sampling import Sampler
from rl.tasks.mixture import encode_prompt


def complete(
    run_dir: Path, questions: Sequence[str], *, max_new_tokens: int = 128, temperature: float = 0.0
) -> list[str]:
    """Return an answer to each question, by the newest weights of a run of `axl train small_llama`."""
    cfg = from_text(RunDirectory.attach(run_dir).config_path.read_text())
    assert isinstance(cfg, Trainer.Config)
    tokenizer = TOKENIZER.build()
    sizes = RolloutEngine.Config(
        model=cfg.model, stop_tokens=tokenizer.stop_ids, max_prompt_tokens=256, max_new_tokens=max_new_tokens
    )
    sizes.set(sampler=Sampler.Config(temperature=temperature), max_num_seqs=8)
    engine = sizes.build(decode=partial(completion_text, tokenizer))
    engine.set_weights(restore_params(run_dir), version=0)
    prompts = [Prompt(i, "text", encode_prompt(question, tokenizer)) for i, question in enumerate(questions)]
    rollouts = engine.generate([Request(prompt) for prompt in prompts])
    return [completion_text(tokenizer, rollout.tokens.tolist()) for rollout in rollouts]


if __name__ == "__main__":
    for answer in complete(Path(sys.argv[1]), sys.argv[2:]):
        print(answer)
