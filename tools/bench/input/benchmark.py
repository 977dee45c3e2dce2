"""Tokens of training input per CPU second: tokenising, packing, and the global plan that every host computes."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from axlearn_like.input import FirstFit, FirstFitDecreasing, JsonLines, OneARow, SupervisedInput
from axlearn_like.tokenizers.bytes import ByteTokenizer
from tools.bench.harness.circumstances import circumstances, machine

CASES = {
    "first_fit": (FirstFit.Config(), 1),
    "first_fit_decreasing": (FirstFitDecreasing.Config(), 1),
    "one_a_row": (OneARow.Config(), 1),
    "first_fit_1_host_of_16": (FirstFit.Config(), 16),
}


def run(documents: int = 5000, seq_len: int = 4096, batch_size: int = 64, batches: int = 10) -> dict[str, Any]:
    """Write documents of log-normal length, median 400 bytes, tokenise them, and make batches.

    Returns:
        `tokenise_tokens_per_cpu_s`; and for each way of packing `tokens_per_cpu_s` (live tokens of the global batch),
        `cpu_ms_per_batch` and `packing` (live tokens / places). CPU seconds of all threads, one process.
    """
    lengths = np.random.default_rng(0).lognormal(6, 1, documents).astype(int).clip(1, 20_000)
    result: dict[str, Any] = {
        "bench": "input",
        "documents": documents,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "errors": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        path.write_text("".join(json.dumps({"text": "x" * int(length)}) + "\n" for length in lengths))
        source = JsonLines.Config(files=str(path), tokenizer=ByteTokenizer.Config(), cache=folder)
        began = time.process_time()
        source.build()
        result["tokenise_tokens_per_cpu_s"] = round(float(lengths.sum()) / (time.process_time() - began))
        for name, (rows, hosts) in CASES.items():
            cfg = SupervisedInput.Config(source=source, seq_len=seq_len, batch_size=batch_size, rows=rows, long="split")
            data = cfg.set(prefetch=0).build(rows=np.arange(batch_size // hosts))
            next(data)  # opens the files
            began, packing = time.process_time(), []
            for _ in range(batches):
                next(data)
                packing.append(data.metrics()["packing"])
            seconds, filled = (time.process_time() - began) / batches, float(np.mean(packing))
            result[name] = {
                "tokens_per_cpu_s": round(filled * batch_size * seq_len / seconds),
                "cpu_ms_per_batch": round(seconds * 1e3, 2),
                "packing": round(filled, 4),
            }
            data.close()
    return {**result, "machine": machine(), **circumstances(("axlearn-like", "numpy", "grain"))}
