"""Runs that were launched: submitted, looked at, stopped, by the objects of a cluster's API."""
