"""Comparison of the config of a run with the one that is to resume it."""

import re

from axlearn_like.config import strip_comments

_POLICIES = re.compile(r"^polic(?:ies|y_shares|y_quotas)\b.*\n?", re.MULTILINE)  # fields of a run with several
_SEVERAL = re.compile(r"^policies: (?!\{\}$)", re.MULTILINE)
_NUM_STEPS = re.compile(r"^num_steps: (\d+)$", re.MULTILINE)


def same_run(recorded: str, wanted: str) -> bool:
    """Return True if a run with the recorded config text may be resumed with the wanted one.

    Comments may differ, and `num_steps` may be larger than it was: a run can be extended. Where several policies
    are trained, others may come or go: each has a directory of its own, with its config.
    """
    old, new = strip_comments(recorded), strip_comments(wanted)
    if _SEVERAL.search(old) and _SEVERAL.search(new):
        old, new = _POLICIES.sub("", old), _POLICIES.sub("", new)
    before, after = _NUM_STEPS.search(old), _NUM_STEPS.search(new)
    if before and after and int(before[1]) < int(after[1]):
        new = new[: after.start()] + before[0] + new[after.end() :]
    return old == new
