"""The agent of a node keeps snapshots in shared memory while training processes come and go.  Torch-free.

`machine` decides, with `leases` and `commits`: pure functions on the state in `jobs`, which return
`effects`.  `agent` is the process, which carries them out.  `segment` has the files in shared memory,
`servers` check who may ask, `requests` has what waits for an answer, `client` talks to the agent, and
`fetch` reads ranges from agents of other nodes.
"""
