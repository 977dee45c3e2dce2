"""Arrow Flight: `do_get` of one array between two processes over loopback gRPC, left where Arrow has put it.

    python arrow_flight.py NBYTES

Run by the benchmark with the interpreter of the peer's environment (see `environments.py`); needs pyarrow alone.
"""

# Imports that only the peer's environment can resolve:
# pyright: reportMissingImports=false

import json
import multiprocessing
import sys
import time
from typing import Any

import pyarrow as pa
from pyarrow import flight

BATCH = 1 << 24  # bytes of a record batch


class Server(flight.FlightServerBase):
    """A server of one column of bytes."""

    def __init__(self, nbytes: int):
        super().__init__("grpc://127.0.0.1:0")
        self._table = pa.table({"w": payload(nbytes)})

    def do_get(self, context: object, ticket: flight.Ticket) -> flight.FlightDataStream:
        """Stream the column in batches."""
        batches = self._table.to_batches(max_chunksize=BATCH)
        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(self._table.schema, batches))


def payload(nbytes: int) -> pa.Array:
    """Return the bytes to move."""
    block = bytes(range(251)) * 1000
    whole = (block * (nbytes // len(block) + 1))[:nbytes]
    return pa.Array.from_buffers(pa.uint8(), nbytes, [None, pa.py_buffer(whole)])


def serve(connection: Any, nbytes: int) -> None:
    """Run the sending process: send the port, then the CPU seconds used so far for each request."""
    server = Server(nbytes)
    connection.send(server.port)
    while connection.recv():
        connection.send(time.process_time())


def main(nbytes: int) -> None:
    """Move the bytes twice and print the figures of the second time."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=serve, args=(theirs, nbytes), daemon=True)
    sender.start()
    client, walls, received = flight.connect(f"grpc://127.0.0.1:{ours.recv()}"), [], None
    before = after = mine = 0.0
    for _ in range(2):
        ours.send(True)
        before, cpu, began = ours.recv(), time.process_time(), time.perf_counter()
        received = client.do_get(flight.Ticket(b"w")).read_all().column(0)
        walls, mine = [*walls, time.perf_counter() - began], time.process_time() - cpu
        ours.send(True)
        after = ours.recv()
    assert received is not None and received.combine_chunks().equals(payload(nbytes)), "what came is not what was sent"
    sides = {"cpu_s": mine + after - before, "sender_cpu_s": after - before, "receiver_cpu_s": mine}
    print(json.dumps({"wall_s": walls[1], "first_wall_s": walls[0], **sides}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
