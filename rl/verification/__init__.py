"""The verification service: scores answers in processes that can be killed, with deadlines.

`service` is the role, `pool` keeps the processes, `worker` is what runs in one, `scorers` are what
it calls.
"""
