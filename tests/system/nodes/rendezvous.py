"""The rendezvous of a job, hosted by a process that is no torchrun: `python rendezvous.py ADDRESS PORT`."""

import sys
import threading

from torch.distributed import TCPStore

store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
threading.Event().wait()
