"""Measurements of our engine alone: one module for each section of `axl bench rollout` (`harness.sections`).

Each result has `warm_compiles`: programs that anything in the process compiled after the section's warm-up.
"""

SECTIONS = {
    "long_tail": "lengths with a long tail: continuous against static batching, and against the bound",
    "prefix": "what a group shares of its prompt: prefill work and pages",
    "inflight_pause": "how long a change of weights keeps rows from drawing",
    "concurrency_sweep": "throughput and latency for 1 to 128 requests at a time",
    "fill": "throughput with the cache a tenth and nine tenths full",
    "speculation": "drafts from sibling samples: CPU seconds on a long tail, and equal tokens",
    "cascade": "samples of a long prompt: CPU seconds and keys read with shared keys, and equal tokens",
    "quantised": "int8 weights: arguments of the decode program, CPU seconds",
    "cold_compile": "the decode program without a cache: CPU seconds to trace, lower and compile",
    "host": "host time of a dispatch",
}
