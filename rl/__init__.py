"""Reinforcement learning: tasks, verifiers, rollouts, parameter server, controller, objectives.

A policy reaches this room as a config; nothing here imports `models`.
"""
