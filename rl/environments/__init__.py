"""Environments: what a policy acts in for several turns, with tools, until an end and a reward.

`environment` is the interface, `task` gives one to the problems of a task, `loop` plays it on the engine's scheduler,
`tool_environment` and `tools/` are the environment of tools, `adapters` take classes of other libraries.
"""
