"""A small model of our own, for examples and tests that need real text and real weights, and no download of weights.

The data are two published texts in the folder that the environment variable AXL_DATA names; docs/how-to/small-model.md
says where they come from. The tokenizer is beside this file: `axl data train-tokenizer` on the same texts.
"""

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import ConfigBase
from axlearn_like.input import Chat, JsonLines, Mixture, Part, PlainText, PromptAnswer, SupervisedInput
from axlearn_like.learner import AdamW, Learner, WarmupCosine
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.trainer import Trainer
from experiments.registry import experiment
from models.dense import dense

TOKENIZER = HuggingFaceTokenizer.Config(path="experiments:small_bpe")
DATA = "$AXL_DATA"
GSM8K = "https://github.com/openai/grade-school-math (grade_school_math/data), compressed by gzip"
SHAKESPEARE = "https://github.com/karpathy/char-rnn (data/tinyshakespeare/input.txt), compressed by gzip"


def small_model() -> ConfigBase:
    """A Llama-shaped decoder of 5.2 M parameters with 2,048 tokens and a tied head."""
    return dense(
        vocab_size=2048,
        dim=256,
        hidden=768,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        tied=True,
        theta=1e4,
        eps=1e-5,
        max_length=1024,
    ).set(dtype="bfloat16")  # a fifth faster than float32 on CPUs that have it


def problems(split: str) -> JsonLines.Config:
    """GSM8K's problems with their worked answers, all tokens learned."""
    example = PromptAnswer.Config(prompt="question", answer="answer", learn="all")
    files = f"{DATA}/gsm8k/{split}.jsonl.gz"
    return JsonLines.Config(files=files, tokenizer=TOKENIZER.clone(), example=example, origin=GSM8K)


@experiment
def small_llama(*, steps: int = 500, seed: int = 0) -> Trainer.Config:
    """A 5.2 M-parameter Llama learns grade-school problems and Shakespeare's lines, in minutes on two cores."""
    plays = PlainText.Config(
        files=f"{DATA}/text/tinyshakespeare.txt.gz", tokenizer=TOKENIZER.clone(), origin=SHAKESPEARE
    )
    # Fractions of examples, of which both have about 7,000: each is read about as often.
    parts = (
        Part.Config(name="problems", source=problems("train"), weight=0.5),
        Part.Config(name="plays", source=plays, weight=0.5),
    )
    rows = SupervisedInput.Config(
        source=Mixture.Config(parts=parts), seq_len=256, batch_size=8, long="split", seed=seed
    )
    return Trainer.Config(
        model=small_model(),
        input=rows,
        learner=Learner.Config(
            optimizer=AdamW.Config(b1=0.9, b2=0.98, weight_decay=0.1),
            schedule=WarmupCosine.Config(
                peak_lr=2e-3, warmup_steps=max(1, steps // 12), total_steps=steps, end_lr=1e-4
            ),
        ),
        checkpoint=Checkpointer.Config(save_every=100, keep=1),
        mesh={"data": -1},
        num_steps=steps,
        evaluators=(LossEvaluator.Config(input=rows.clone(source=problems("test")), batches=4),),
        seed=seed,
    )


@experiment
def small_chat(*, steps: int = 300, seed: int = 0) -> Trainer.Config:
    """The same Llama learns to answer grade-school problems as an assistant: the loss is on its turns alone."""
    talks = TOKENIZER.clone(chat_template="experiments:small_bpe/chat.jinja")

    def rows(split: str) -> SupervisedInput.Config:
        source = problems(split).set(tokenizer=talks, example=Chat.Config(turns=("question", "answer")))
        return SupervisedInput.Config(source=source, seq_len=768, batch_size=4, seed=seed)

    cfg = small_llama(steps=steps, seed=seed)
    return cfg.set(input=rows("train"), evaluators=(LossEvaluator.Config(input=rows("test"), batches=4),))
