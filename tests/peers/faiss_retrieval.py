"""Worker of `axl bench retrieval`: faiss, one IVF index with an id selector for each tenant, or an index for each.

The first step finds the least number of probed lists that reaches a recall of 0.95 (of small and of large tenants,
separately); later steps use it. Indices of a tenant are flat up to 1,000 vectors. One thread.
"""

import sys
from pathlib import Path

import faiss
import numpy as np
from harness.protocol import StepServer
from retrieval.data import COUNT, SMALL, ask, read

RECALL = 0.95
PROBES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def ivf(vectors, lists):
    """Return a trained and filled IVF index."""
    index = faiss.index_factory(vectors.shape[1], f"IVF{lists},Flat")
    index.train(vectors)
    index.add(vectors)
    return index


def filtered(data):
    """Return a search of one index, in which a bitmap selects a tenant's ids, and its bytes."""
    count = len(data.vectors)
    index = ivf(data.vectors, max(4, min(1024, int(2.3 * count**0.5))))
    maps = {}
    for tenant in set(data.askers.tolist()):
        bits = np.zeros(-(-count // 8) * 8, np.uint8)
        bits[data.seen[tenant]] = 1
        maps[tenant] = np.packbits(bits, bitorder="little")
    selectors = {tenant: faiss.IDSelectorBitmap(bits) for tenant, bits in maps.items()}

    def search(tenant, query, probes):
        options = faiss.SearchParametersIVF(sel=selectors[tenant], nprobe=probes)
        return index.search(query[None], COUNT, params=options)[1][0]

    search.kept = maps  # the selectors point into them
    return search, {"ivf": faiss.serialize_index(index).nbytes}


def apart(data):
    """Return a search of an index for each tenant, and the bytes of HNSW (M = 16) by vector, on 20 of the tenants."""
    indices = {}
    for tenant in set(data.askers.tolist()):
        own = data.vectors[data.seen[tenant]]
        if len(own) > 1000:
            indices[tenant] = ivf(own, int(len(own) ** 0.5))
        else:
            indices[tenant] = faiss.IndexFlatL2(own.shape[1])
            indices[tenant].add(own)

    def search(tenant, query, probes):
        index = indices[tenant]
        options = faiss.SearchParametersIVF(nprobe=probes) if hasattr(index, "nprobe") else None
        return data.seen[tenant][index.search(query[None], COUNT, params=options)[1][0]]

    used = vectors = 0
    few = [seen for seen in data.seen if len(seen) <= SMALL * len(data.vectors)]
    for seen in few[:: max(1, len(few) // 20)]:
        graph = faiss.IndexHNSWFlat(data.vectors.shape[1], 16)
        graph.add(data.vectors[seen])
        used, vectors = used + faiss.serialize_index(graph).nbytes, vectors + len(seen)
    return search, {"hnsw_per_vector": used / vectors}


def main():
    """Answer all queries once for each request; the arguments are `filtered` or `apart`, and the file of the job."""
    kind, path = sys.argv[1:]
    faiss.omp_set_num_threads(1)
    data = read(Path(path))
    server = StepServer(f"faiss {faiss.__version__}", data.vectors.size)
    search, used = {"filtered": filtered, "apart": apart}[kind](data)
    small = {tenant for tenant, seen in enumerate(data.seen) if len(seen) <= SMALL * len(data.vectors)}
    chosen = {}

    def step(number):
        if number == 0:
            for name in ("small", "large"):
                for probes in PROBES:
                    chosen[name] = probes
                    if (
                        ask(data, lambda tenant, query, probes=probes: search(tenant, query, probes))[f"{name}_recall"]
                        >= RECALL
                    ):
                        break
            server.note(bytes=used, probes=chosen)
        probes = {tenant: chosen["small" if tenant in small else "large"] for tenant in data.askers.tolist()}
        server.note(**ask(data, lambda tenant, query: search(tenant, query, probes[tenant])))

    server.serve(step)


if __name__ == "__main__":
    main()
