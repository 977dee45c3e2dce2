"""The entry for scripts and notebooks: `run` trains an experiment in this process and returns what came of it.

    >>> from tools.run import run
    >>> done = run("demo_sft", sets={"num_steps": 3, "early_stopping": None, "evaluators": ()}, quiet=True)
    >>> done.finished, done.metrics[-1]["step"]
    (True, 3)
    >>> answers = done.policy().generate("Add the complex numbers: (3 + 4i) + (2 + 5i)", samples=2)
    >>> len(answers)
    2

`run("demo_sft")` is what `axl train demo_sft` is, in the same directory, `runs/demo_sft`. Called again it resumes, or
returns at once if all is done. Ctrl-C, or the interrupt button of a notebook, stops after the current update.
"""

from tools.run.finished import FinishedRun, Html, Row, live_plot, plot_rows
from tools.run.policy import Policy, load_policy
from tools.run.running import OnStep, run

__all__ = ["FinishedRun", "Html", "OnStep", "Policy", "Row", "live_plot", "load_policy", "plot_rows", "run"]
