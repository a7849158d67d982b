"""A save, from the call to the manifest.

`operation.py` has the save itself, in five phases, and the protocol of a `Keeper`, which keeps its image.
`saver.py` has the parts that the saves of a run share; `durable.py` keeps images in storage.  Follow a save
from `Durable.begin`, and then through `SaveOperation` from top to bottom.
"""

from holdfast.live.saving.handle import Save, error_text
from holdfast.live.saving.operation import Draft, Keeper, Request, SaveOperation
from holdfast.live.saving.saver import Saver

__all__ = ["Draft", "Keeper", "Request", "Save", "SaveOperation", "Saver", "error_text"]
