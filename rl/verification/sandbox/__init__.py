"""The sandbox: runs code that nobody trusts, in processes without network, files, privileges or secrets.

`sandbox` is what callers use, `zygote` the warm process that boxes are forked from, `box` what runs in one, `isolation`
(namespaces), `landlock` and `calls` (a filter) the walls around it, `values` the data that crosses them.
"""
