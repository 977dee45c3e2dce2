"""Arrow Flight: `do_get` of one array, between two processes over loopback gRPC, in pyarrow's own environment.

    python arrow_flight.py WAY NBYTES OPTIONS

Needs pyarrow only, none of our packages. The receiver uses the array where Arrow has put it; nothing is copied on our
side. `OPTIONS["batch"]`: bytes of a record batch.
"""

# pyright: reportMissingImports=false

import json
import subprocess
import sys
import time

import pyarrow as pa
from pyarrow import flight


def measure(nbytes: int, batch: int) -> dict[str, float]:
    """Measure this way, as `receiving.measure` does."""
    command = [sys.executable, __file__, "--serve", str(nbytes), str(batch)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def cpu() -> float:
            stdin.write("\n")
            stdin.flush()
            return float(stdout.readline())

        client = flight.connect(f"grpc://127.0.0.1:{int(stdout.readline())}")
        began = time.perf_counter()
        _pull(client, nbytes)
        first = time.perf_counter() - began
        theirs, mine, began = cpu(), time.process_time(), time.perf_counter()
        received = _pull(client, nbytes)
        wall, mine, theirs = time.perf_counter() - began, time.process_time() - mine, cpu() - theirs
        assert received.combine_chunks().equals(_payload(nbytes)), "what came is not what was sent"
        process.kill()
    return {"first_wall_s": first, "wall_s": wall, "sender_cpu_s": theirs, "receiver_cpu_s": mine}


def _pull(client: flight.FlightClient, nbytes: int) -> pa.ChunkedArray:
    column = client.do_get(flight.Ticket(b"w")).read_all().column(0)
    assert len(column) == nbytes
    return column


def _payload(nbytes: int) -> pa.Array:
    block = bytes(range(251)) * 1000
    whole = (block * (nbytes // len(block) + 1))[:nbytes]
    return pa.Array.from_buffers(pa.uint8(), nbytes, [None, pa.py_buffer(whole)])


class _Server(flight.FlightServerBase):
    def __init__(self, nbytes: int, batch: int):
        super().__init__("grpc://127.0.0.1:0")
        self._table = pa.table({"w": _payload(nbytes)})
        self._batch = batch

    def do_get(self, context: object, ticket: flight.Ticket) -> flight.FlightDataStream:
        batches = self._table.to_batches(max_chunksize=self._batch)
        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(self._table.schema, batches))


def _serve(nbytes: int, batch: int) -> None:
    server = _Server(nbytes, batch)
    print(server.port, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(int(sys.argv[2]), int(sys.argv[3]))
    else:
        print(json.dumps(measure(int(sys.argv[2]), int(json.loads(sys.argv[3])["batch"]))))
