"""Tables [devices, slots] that are being filled: -1 where a slot is empty, those of a device filled from the first on.

`used` counts the filled slots of each device, `loads` what they take, `each` is the load of one replica of each expert.
"""

import numpy as np

from axlearn_like.layers.moe.placement.plan import Array


def put(table: Array, used: Array, loads: Array, expert: int, count: int, each: Array) -> None:
    """Put so many copies of an expert on devices with a free slot that have none, the least loaded first."""
    free = np.nonzero((used < table.shape[1]) & ~np.any(table == expert, axis=1))[0]
    chosen = free[np.lexsort((free, used[free], loads[free]))[:count]]
    table[chosen, used[chosen]] = expert
    used[chosen] += 1
    loads[chosen] += each[expert]


def fill(table: Array, used: Array, loads: Array, each: Array) -> None:
    """Fill slots that are left: with the most loaded expert that the device has not, or with one that it has."""
    popular = np.argsort(-each, kind="stable")
    for device in np.nonzero(used < table.shape[1])[0]:
        own = table[device, : used[device]]
        others = popular[~np.isin(popular, own)]
        more = np.concatenate([others, popular.repeat(table.shape[1])])[: table.shape[1] - used[device]]
        table[device, used[device] :] = more
        loads[device] += each[more].sum()
    used[:] = table.shape[1]
