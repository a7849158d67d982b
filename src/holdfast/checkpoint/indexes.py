"""The indexes beside a consolidated step's manifest, by which Hugging Face's loaders find its weights.

All that an index says follows from the manifest, so a copy of a step makes its indexes anew.
"""

from __future__ import annotations

import json
import math

from holdfast.checkpoint.tidying import INDEX
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import Manifest


def indexes(manifest: Manifest) -> dict[str, bytes]:
    """The index of each key with weights, by its name; paths in it are relative to itself."""
    weights = {file.rank: file for file in manifest.files if file.strip}
    maps: dict[str, dict[str, str]] = {}
    sizes: dict[str, int] = {}
    for t in manifest.tensors:
        file = weights.get(t.sharding)
        if file is not None and 0 not in t.shape:
            key = file.strip.removesuffix(".")
            maps.setdefault(key, {})[t.name.removeprefix(file.strip)] = file.path
            sizes[key] = sizes.get(key, 0) + math.prod(t.shape) * DTYPES[t.dtype].bytes
    found = {}
    for key, weight_map in maps.items():
        index = {
            "metadata": {"total_size": sizes[key]},
            "weight_map": dict(sorted(weight_map.items())),
        }
        found[key + INDEX] = (json.dumps(index, indent=2) + "\n").encode()
    return found
