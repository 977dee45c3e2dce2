"""Rows of GSM8K (openai/grade-school-math). Its files are the user's, by path: docs/how-to/small-model.md."""

from experiments.datasets import dataset
from rl.tasks.rows.datasets import rows
from rl.tasks.rows.task_rows import TaskRows


@dataset()
def gsm8k(files: str | tuple[str, ...], heldout: str | tuple[str, ...] | None = None) -> TaskRows.Config:
    """Grade-school problems: the final number is scored, in the forms of `final_number`."""
    cfg = rows(files, heldout, prompt="question", answer="answer", answer_after="####", final="number")
    return cfg.set(label="gsm8k")
