"""The agent of a node: keeps snapshots in shared memory while training processes come and go.  Torch-free.

`machine` decides (pure), on `jobs`, by `leases` and `commits`, and says it in `effects`.  `segment` is what
lies in shared memory, `agent` is the process, `servers` let in who may ask, `requests` are those that wait
for an answer, `job_notes` what the next agent is told, `client` talks to it, `fetch` reads ranges from
other nodes' agents.
"""
