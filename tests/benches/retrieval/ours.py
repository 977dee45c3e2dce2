"""Worker of `axl bench retrieval`: our index, shared by all tenants, or one of ours for each tenant."""

import sys
from pathlib import Path

import numpy as np

from rl.environments.retrieval.index import TenantIndex
from tests.benches.retrieval.data import COUNT, Array, RetrievalData, ask, read
from tools.bench.harness.circumstances import system_version
from tools.bench.harness.protocol import StepServer


def shared(data: RetrievalData) -> TenantIndex:
    """Return one index of all documents, granted to their tenants."""
    index = TenantIndex(data.vectors.shape[1])
    index.insert(np.arange(len(data.vectors)), data.vectors)
    for tenant, seen in enumerate(data.seen):
        index.grant(str(tenant), seen)
    return index


def apart(data: RetrievalData) -> dict[int, TenantIndex]:
    """Return an index for each tenant that asks, of copies of its vectors."""
    indices: dict[int, TenantIndex] = {}
    for tenant in set(data.askers.tolist()):
        indices[tenant] = TenantIndex(data.vectors.shape[1])
        indices[tenant].insert(data.seen[tenant], data.vectors[data.seen[tenant]], [str(tenant)])
    return indices


def main() -> None:
    """Answer all queries once for each request; the arguments are `shared` or `apart`, and the file of the job."""
    kind, path = sys.argv[1:]
    data = read(Path(path))
    server = StepServer(system_version(), data.vectors.size)
    if kind == "shared":
        index = shared(data)
        indices = dict.fromkeys(data.askers.tolist(), index)
    else:
        indices = apart(data)

    def search(tenant: int, query: Array) -> Array:
        return indices[tenant].search(query, str(tenant), COUNT)[0]

    def step(number: int) -> None:
        server.note(**ask(data, search))
        if kind == "shared" and number == 0:
            server.note(bytes=index.nbytes())

    server.serve(step)


if __name__ == "__main__":
    main()
