"""The steps of a root: to open, read, commit, claim, verify, compare, copy and delete them.

Knows bytes, layouts and stores, but nothing of torch, live objects or process groups: ranks that read
together are a `Group` of `core.group`, whose type alone is known here.
"""
