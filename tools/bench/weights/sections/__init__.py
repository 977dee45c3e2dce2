"""Measurements of the parameter server: one module for each section of `axl bench weights` (`harness.sections`)."""

SECTIONS = {
    "moving": "push and pull of a gigabyte, by turns with a raw stream and a copy in memory",
    "pause": "how long a change of weights keeps the engine from drawing, while versions come in beside it",
    "first_token": "seconds from the end of an update to the first token of the new weights, for 0.6B parameters",
}
