"""Supervision of the processes of a run: restarts, health checks and spares, over Ray or a simulation."""
