"""Measurements of our engine alone: one module for each section of `axl bench rollout` (`harness.sections`).

Each result has `warm_compiles`: programs that anything in the process compiled after the section's warm-up.
"""

SECTIONS = {
    "long_tail": "lengths with a long tail: continuous against static batching, and against the bound",
    "host": "host time of a dispatch",
}
