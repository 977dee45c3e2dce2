"""Elastic updates of a decoder whose experts are spread over the members of a run."""
