"""The verification service: scores answers in processes that can be killed, with deadlines.

`service` is the role, `pool` keeps the processes, `worker` is what runs in one, `scorers` are what it calls; those of
`verifiers` compare answers with rows, or are made of a user's functions. Code that answers contain runs in a `sandbox`.
"""
