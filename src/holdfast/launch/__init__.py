"""The launcher `holdfast run`, and recovery in place.

    launcher                    holdfast run: torch's elastic agent with workers of our own kind
      └─ fork server            has imported torch and what `--preload` names; one thread
           ├─ rank 0 ... 3      forked: a worker begins in a tenth of a second
           └─ spare             has run the script up to its recoverable function, and waits there

When a rank dies, the launcher sends `leave` to the others.  Each cuts its connections to its peers, so that
every collective that it is blocked in fails, leaves the function by that exception, drops what it held, and
says `left`.  Then the launcher meets the other nodes at the rendezvous, as ever, and sends `enter` with new
ranks: to those that have left, and to a spare, or a newly forked process, for the rank that is lost.

A script without a recoverable function is started again as a whole, from the fork server.

    command     options, the fork server, the status at the end
    agent       of a node: when an attempt ends, and how the next begins; `again`, `nodes` and `rendezvous`
                are what it knows of failures before, of other nodes, and of where they meet
                (`torch_rendezvous`, `meeting_state`, `etcd_store`, `door`, `sockets`) and what they say
                there in a `round`
    workers     the processes of a node, over their `channel`; `hangs` says when they make no progress
    recovery    in a worker: leaving and entering; `cutting`, `leftovers` and `registers` are what it does
                between
"""
