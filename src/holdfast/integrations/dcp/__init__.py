"""torch.distributed.checkpoint (DCP) over holdfast's own format: its `StorageWriter` and `StorageReader`.

    dcp.save(state_dict, storage_writer=holdfast.dcp.Writer("runs/gpt"), checkpoint_id="10")   # step 10
    dcp.load(state_dict, storage_reader=holdfast.dcp.Reader("runs/gpt"))                       # the newest

DCP still plans which rank saves which part, and exchanges messages between ranks; holdfast lays out each
rank's image, writes it with its digests, and commits the step by one manifest:

    coordinator   prepare_global_plan   the number of the step, and the folder of this attempt
    every rank    write_data            its image; the result tells the coordinator what was written
    coordinator   finish                one manifest of all results: from here on the step exists

The layout of the images follows from the results that `finish` gets, not from plans: with plan caching,
DCP's plans are empty.  Each tensor has its own sharding and tensors are sorted by name, so that ranks can
lay out their parts without knowing those of others.

Names are those of holdfast (`names.py`): `holdfast.load(root, {"model": model, "optim": optimizer})` loads
a step of `dcp.save({"model": ..., "optim": ...})`, and `Reader` reads the steps of a `Checkpointer`.
"""

from holdfast.integrations.dcp.reader import Reader
from holdfast.integrations.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
