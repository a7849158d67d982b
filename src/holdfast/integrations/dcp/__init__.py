"""torch.distributed.checkpoint (DCP) over holdfast's own format: its `StorageWriter` and `StorageReader`.

    dcp.save(state_dict, storage_writer=holdfast.dcp.Writer("runs/gpt"), checkpoint_id="10")   # step 10
    dcp.load(state_dict, storage_reader=holdfast.dcp.Reader("runs/gpt"))                       # the newest

DCP goes on to plan who saves what, and to talk between ranks; holdfast lays out each rank's image, writes
it with its digests, and commits the step by one manifest:

    coordinator   prepare_global_plan   the number of the step, and the folder of this attempt
    every rank    write_data            its image; it tells the coordinator what it has written
    coordinator   finish                one manifest of all that: from here on the step exists

The layout of the images follows from the results that `finish` gets, not from plans: with plan caching DCP
hands out empty ones.  So that ranks can lay out their parts without knowing those of others, each tensor
has a sharding of its own, and tensors are sorted by name.

Names are those of holdfast (`names.py`), so `holdfast.load(root, {"model": model, "optim": optimizer})`
finds what `dcp.save({"model": ..., "optim": ...})` has saved, and `Reader` reads what a `Checkpointer` has.
"""

from holdfast.integrations.dcp.reader import Reader
from holdfast.integrations.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
