"""The loops of tinker-cookbook, unchanged but for the address: supervised and RL, on a service with a tiny base.

`python cookbook_loops.py URL MODEL FOLDER WORD WORD` prints a line of JSON: rows of metrics of both loops, then ends.
A WORD is the numbers of its tokens, with commas: the first is the prompt, the second the answer that is taught.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz
import tinker
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder

URL, MODEL, FOLDER, PROMPT, ANSWER = sys.argv[1:6]
PROMPT_TOKENS, ANSWER_TOKENS = ([int(token) for token in word.split(",")] for word in (PROMPT, ANSWER))
STEPS, GROUPS, SAMPLES = 20, 4, 8


class Numbers:
    """A tokenizer whose text is the numbers of tokens."""

    bos_token = eos_token = ""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: Any, **_: Any) -> str:
        return " ".join(map(str, [tokens] if isinstance(tokens, int) else tokens))


class Rows(SupervisedDataset):
    """The answer behind the prompt, twice a batch."""

    def get_batch(self, index: int) -> list[tinker.Datum]:
        tokens = PROMPT_TOKENS + ANSWER_TOKENS
        weights = [0.0] * (len(PROMPT_TOKENS) - 1) + [1.0] * len(ANSWER_TOKENS)
        row = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
        )
        return [row, row]

    def __len__(self) -> int:
        return STEPS

    def set_epoch(self, seed: int = 0) -> None:
        pass


@chz.chz
class RowsBuilder(SupervisedDatasetBuilder):
    def __call__(self) -> Any:
        return Rows(), None


class Parity(Env):
    """Rewarded is a first token that is as even, or odd, as the answer's."""

    async def initial_observation(self) -> Any:
        return tinker.ModelInput.from_ints(PROMPT_TOKENS), []

    async def step(self, action: Any, *, extra: Any = None) -> StepResult:
        done = tinker.ModelInput.from_ints([])
        reward = float(action[0] % 2 == ANSWER_TOKENS[0] % 2)
        return StepResult(reward=reward, episode_done=True, next_observation=done, next_stop_condition=[])


class Group(EnvGroupBuilder):
    async def make_envs(self) -> Sequence[Env]:
        return [Parity() for _ in range(SAMPLES)]


class Problems(RLDataset):
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [Group() for _ in range(GROUPS)]

    def __len__(self) -> int:
        return STEPS


@chz.chz
class ProblemsBuilder(RLDatasetBuilder):
    async def __call__(self) -> Any:
        return Problems(), None


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics that a loop has written."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Run both loops."""
    tokenizer_utils.register_tokenizer(MODEL, Numbers)
    shared: Any = {"model_name": MODEL, "base_url": URL, "lora_rank": 4, "eval_every": 0, "save_every": STEPS // 2}
    taught, learned = Path(FOLDER) / "supervised", Path(FOLDER) / "rl"
    first = supervised.Config(
        recipe_name="ours", log_path=str(taught), dataset_builder=RowsBuilder(), learning_rate=2e-2, **shared
    )
    asyncio.run(supervised.main(first))
    second = rl.Config(
        recipe_name="ours",
        log_path=str(learned),
        dataset_builder=ProblemsBuilder(),
        learning_rate=2e-2,
        max_tokens=2,
        **shared,
    )
    asyncio.run(rl.main(second))
    print(json.dumps({"supervised": rows(taught), "rl": rows(learned)}))


if __name__ == "__main__":
    main()
