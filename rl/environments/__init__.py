"""Environments: what a policy acts in for several turns, with tools, until an end and a reward.

`environment` is the interface, `task` gives one to the problems of a task, `tool_environment` and `tools/` are
the environment of tools, `adapters` take classes of other libraries. `rl/rollout/agent_loops/episodes` plays them.
"""
