"""The owner of a cluster who is killed: prints what runs on its nodes, and waits for it."""

import json
import sys
import threading
from pathlib import Path

from holdfast.base.host import start_time
from system.nodes.cluster import Cluster

with Cluster(2, Path(sys.argv[1])) as cluster:
    for node in cluster.nodes:
        node.call(["sh", "-c", "setsid sleep 600 &"])
    pids = [pid for node in cluster.nodes for pid in node.processes().values()]
    print(json.dumps([(pid, start_time(pid)) for pid in pids]), flush=True)
    threading.Event().wait()
