"""RPC over sockets, and shared memory: bytes go from the sender's memory to the receiver's without extra copies.

    server = RpcServer(handle)                                   # handle(operation, fields, body) -> (fields, buffers)
    client = RpcClient(server.endpoint, name="parameter server")
    fields, data = client.call("read", {"tensor": "w"})

Connections are reused for many requests. `connection.py` defines the message format; docs/concepts/weight-transport.md
has the threat model and the measurements (Arrow Flight takes three times the CPU seconds per byte).
"""
