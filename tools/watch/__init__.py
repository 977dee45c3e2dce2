"""Runs as they go on: how each stands, live in the terminal or as a page, and several side by side.

Nothing is asked of a run but the files of its directory: ``standing`` says from these how it stands, ``listing`` lists
runs, ``frame`` draws one, ``live`` follows it, ``serve`` serves its report, ``compare`` compares.
"""
