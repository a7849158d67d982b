"""The agent of a node: keeps snapshots in shared memory while training processes come and go.  Torch-free.

`machine` decides (pure), on `jobs`, by `leases` and `commits`, and says it in `effects`.  `segment` is what
lies in shared memory, `agent` is the process, `doors` lets in who may ask, `client` talks to it, `fetch`
reads ranges from other nodes' agents.
"""
