"""Problems of the demo: three families of reasoning-gym, and the phrases of their questions."""

from rl.tasks.family import TaskFamily
from rl.tasks.mixture import TaskMixture

# Phrases that recur in these families' questions; one token each. Digits and letters stay bytes.
PHRASES = (
    "Spell this word backward (example: sun -> nus): ",
    "the complex numbers: ",
    "in the equation: ",
    "that satisfies: ",
    "the value of ",
    "Solve for ",
    "Determine ",
    "Subtract ",
    "Find ",
    "Add ",
)


def task_mixture(seed: int) -> TaskMixture.Config:
    """Three families that a small decoder can learn to compute; a quarter of all questions is held out."""
    one_to_nine = {"min_real": 1, "max_real": 9, "min_imag": 1, "max_imag": 9}
    halves = [0.5, 0.5]
    return TaskMixture.Config(
        families=(
            TaskFamily.Config(name="spell_backward", params={"min_word_len": 3, "max_word_len": 8}),
            TaskFamily.Config(
                name="complex_arithmetic",
                params={**one_to_nine, "operations": ["+", "-"], "operations_weights": halves},
            ),
            TaskFamily.Config(
                name="simple_equations",
                params={
                    "min_terms": 2,
                    "max_terms": 2,
                    "min_value": 1,
                    "max_value": 9,
                    "operators": ["+", "-"],
                    "operators_weights": halves,
                },
            ),
        ),
        seed=seed,
        heldout_every=4,
    )
