"""States of another shape than their sharded parameter: how memory for them lies.

Torch's own optimizers have none but numbers.  Others keep a flattened copy of a parameter (Prodigy), or
vectors of all parameters together (LBFGS).  Beside a DTensor they are DTensors, and where the ranks of the
parameter's mesh lie as when they were saved they are cut as then: an optimizer that adds up what a rank
holds would compute something else from a whole one.  On other layouts every rank gets all of it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_map_only

from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.layout import Axis
from holdfast.live.state.placed import cut_by, mesh_axes, shard_order


def empty_beside(checkpoint: Checkpoint, name: str, p: DTensor, dtype: torch.dtype) -> DTensor:
    """Memory for a saved state of a parameter, on its mesh."""
    mesh, shape = p.device_mesh, checkpoint.info(name).shape
    placements = _as_saved(checkpoint, name, p)
    box, _ = cut_by(mesh, tuple(mesh.get_coordinate()), tuple(placements), shape)
    local = torch.empty(box.shape, dtype=dtype, device=p._local_tensor.device)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _as_saved(checkpoint: Checkpoint, name: str, p: DTensor) -> list[Placement]:
    """Placements on a parameter's mesh that cut a state as it was saved; all Replicate if none do."""
    mesh, layout = p.device_mesh, checkpoint.manifest.layout
    whole: list[Placement] = [Replicate()] * mesh.ndim
    sharding, axes = checkpoint.info(name).sharding, mesh_axes(mesh)
    if axes is None or sharding.held is not None:
        return whole
    found, order = [*whole], []
    for cut in sharding.cuts:
        size = prod(layout.sizes[one] for one in cut.axes)
        axis = Axis(layout.strides[cut.axes[-1]], size)
        if axis not in axes:
            return whole
        order.append((axes.index(axis), cut.dim))
        found[order[-1][0]] = Shard(cut.dim)
    return found if shard_order(found, tuple(mesh.shape)) == order else whole


def on_mesh_of(p: DTensor, value: Any) -> Any:
    """A value in which plain tensors that have dims are whole on every rank of a parameter's mesh."""
    mesh = p.device_mesh
    everywhere = [Replicate()] * mesh.ndim

    def moved(t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, DTensor) or not t.ndim:
            return t
        return DTensor.from_local(t.to(p._local_tensor.device), mesh, everywhere, run_check=False)

    return tree_map_only(torch.Tensor, moved, value)
