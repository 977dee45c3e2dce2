"""Sharing between the samples of one prompt: prefill work and pages, counted by the engine.

The prompt is prefilled without its last token, once. Its full pages have all samples as holders; the last page, partly
filled, is copied for each sample when it writes its first token there, and so counts once for each.
"""

from typing import Any

from tools.bench.rollout.sections.bed import Bed, after_warm_up


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the keys `prefix_share_prefill_ratio` and `prefix`; 1 / group would be sharing without any loss."""
    bed = Bed(quick=quick)
    prompt, group, new = (64, 4, 32) if bed.quick else (512, 16, 64)
    engine = bed.engine(max_num_seqs=group, max_prompt=prompt, max_new=new, steps_per_dispatch=new // 2)
    page = engine.cfg.page_size
    prompt_pages = -(-prompt // page)

    def one_group() -> dict[str, float]:
        before = engine.stats()
        number = engine.submit(bed.request(new, prompt_tokens=prompt, samples=group))
        while engine.stats()["generation_tokens"] == before["generation_tokens"]:
            engine.step()
        after = engine.stats()
        drawn = (after["generation_tokens"] - before["generation_tokens"]) // group
        # Each sample holds pages for all tokens but the last, which is not fed yet.
        behind = group * (-(-int(prompt - 1 + drawn) // page) - prompt_pages)
        others = before["prefix_cache_pages"]  # of earlier groups
        engine.abort(number)
        while engine.busy:
            engine.step()
        return {
            "prefill_tokens": after["prefill_tokens"] - before["prefill_tokens"],
            "prompt_pages_held": after["pages_used"] - others - behind,
        }

    (counted,), compiled = after_warm_up(1, one_group)
    full = (prompt - 1) // page
    return {
        "prefix_share_prefill_ratio": counted["prefill_tokens"] / (group * (prompt - 1)),
        "prefix": {
            "prompt_tokens": prompt,
            "group": group,
            **counted,
            "pages_ratio": counted["prompt_pages_held"] / (group * prompt_pages),
            # without the last page of each sample, which it writes itself
            "full_pages_ratio": (counted["prompt_pages_held"] - group * (prompt_pages - full)) / (group * full),
        },
        "warm_compiles": compiled,
    }
