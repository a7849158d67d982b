"""Orders of loaders, put back at a restore: seeds and generators of samplers (`state.data_order`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast.base.errors import FormatError
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.extras import ORDER
from holdfast.live.restore.decoding import decode_value
from holdfast.live.state.data_order import data_of, put_order_later, put_seeds, tell_other_data
from holdfast.live.state.recognising import is_loader


def put_orders(
    checkpoint: Checkpoint,
    objects: Mapping[str, Iterable[tuple[str, Any]]],
    own: dict[str, Any],
    rule: Callable[[str], str | None],
) -> None:
    """Put samplers' seeds and generators back, and tell of places that were saved over other data.

    `objects`: (path, object) pairs by key of the state.  `own`: extras of this rank; none if the mesh is
    another than that of the save.  Then the first rank's data are compared, and its seeds are put back,
    which are the same on all ranks.
    """
    manifest = checkpoint.manifest
    known = {*manifest.extras, *manifest.per_rank}
    first: dict[str, Any] | None = None
    for key, pairs in objects.items():
        for path, loader in pairs:
            name = f"{path}.{ORDER}"
            if not is_loader(loader) or name not in known:
                continue
            tree = own.get(name, manifest.extras.get(name))
            is_whole = name in own or manifest.layout.world == 1
            if tree is None and rule(key) != "fresh":
                if first is None:
                    first = checkpoint.rank_extras(min(manifest.file_of))
                tree, is_whole = first.get(name), False
            if tree is not None:
                _put(path, loader, _checked(name, decode_value(tree)), is_whole=is_whole)


def _put(path: str, loader: Any, saved: dict[str, Any], *, is_whole: bool) -> None:
    """Put back a loader's order.  Without `is_whole` its generators, which are each rank's own, stay."""
    if is_whole:
        put_order_later(loader, saved["kept"], amid=saved["amid"])
    else:
        put_seeds(loader, saved["kept"])
    if saved["amid"]:
        tell_other_data(path, saved["data"], data_of(loader))


def _checked(name: str, saved: Any) -> dict[str, Any]:
    if not (isinstance(saved, dict) and {"amid", "data", "kept"} <= saved.keys()):
        raise FormatError(f"malformed extras: {name!r} is no order of a loader")
    return saved
