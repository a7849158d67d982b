"""The layout algebra: boxes, meshes, shardings, and where every element lies.  Pure."""

from holdfast.core.layout.box import Box, flat_range, num_corners, row_major, tiles, whole
from holdfast.core.layout.fragment import Fragment, Stored
from holdfast.core.layout.mesh import Axis, Mesh, common_mesh
from holdfast.core.layout.sharding import Cut, Sharding, chunk, part_of, parts_of

__all__ = [
    "Axis",
    "Box",
    "Cut",
    "Fragment",
    "Mesh",
    "Sharding",
    "Stored",
    "chunk",
    "common_mesh",
    "flat_range",
    "num_corners",
    "part_of",
    "parts_of",
    "row_major",
    "tiles",
    "whole",
]
