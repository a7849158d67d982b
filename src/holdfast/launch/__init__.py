"""The launcher `holdfast run`, and recovery in place.

    launcher                    holdfast run: torch's elastic agent with workers of our own kind
      └─ fork server            has imported torch and what `--preload` names; one thread
           ├─ rank 0 ... 3      forked: a worker begins in a tenth of a second
           └─ spare             has run the script up to its recoverable function, and waits there

When a rank dies, the launcher sends `leave` to the others.  Each cuts its connections to its peers, so that
every collective in which it is blocked fails.  It leaves the function by that exception, drops its tensors
and groups, and says `left`.  Then the launcher meets the other nodes at the rendezvous and sends `enter`
with new ranks: to the processes that have left, and to a spare or a newly forked process for the lost rank.

A script without a recoverable function is started again as a whole, from the fork server.

    command     options, the fork server, the exit status
    elastic_agent
                one per node: ends an attempt and begins the next.  `repeated_failures` counts equal
                failures, `nodes` finds the failure to blame, `rendezvous` meets the other nodes (with
                `torch_rendezvous`, `rendezvous_state`, `etcd_store`, `neighbours`, `sockets`), `round` has
                their messages
    workers     the processes of a node, over their `channel`; `hangs` finds ranks without progress
    recovery    in a worker: leaves and enters the function; `abort_connections`, `leftovers` and
                `registries` clean up between the two
"""
