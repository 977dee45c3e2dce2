"""The documentation states the collectives of the stored compilations."""

import re
from pathlib import Path

from tests.golden.compiles import DIRECTORY

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "parallelism.md"


def test_the_page_on_parallelism_says_what_the_compiled_step_receives():
    text = (DIRECTORY / "llama2_7b.v5p-32.txt").read_text()
    found = dict(re.findall(r"collective over fsdp, ([\w-]+): (?:\d+ times, )?([\d,.]+) MiB", text))
    gigabytes = {kind: f"{float(size.replace(',', '')) * 2**20 / 1e9:.1f} GB" for kind, size in found.items()}
    page = " ".join(PAGE.read_text().split())
    gathered, scattered, reduced = (gigabytes[kind] for kind in ("all-gather", "reduce-scatter", "all-reduce"))
    assert f"{gathered} of all-gathers, {scattered} of reduce-scatters and {reduced} of all-reduces" in page
