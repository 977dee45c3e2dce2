"""The sandbox: runs code that nobody trusts, in processes without network, files, privileges or secrets.

`sandbox` is what callers use, `zygote` the warm process that boxes are forked from, `box` what runs in one, `isolation`
what the kernel grants, `values` the data that crosses the walls.
"""
