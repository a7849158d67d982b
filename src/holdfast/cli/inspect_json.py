"""The JSON that `holdfast inspect --json` prints."""

from __future__ import annotations

from typing import Any

from holdfast.checkpoint.opened import Checkpoint
from holdfast.cli import drawing
from holdfast.cli.figures import foreign_files, tensor_bytes, totals
from holdfast.cli.inspect_one import pieces, places_of
from holdfast.cli.screen import print_json
from holdfast.format.manifest import Manifest, TensorEntry, to_sharding
from holdfast.layout import Sharding


def overview_json(checkpoint: Checkpoint) -> None:
    m = checkpoint.manifest
    print_json(
        _origin_json(checkpoint)
        | {
            "software": m.software,
            "bytes": m.total_bytes,
            "tensors": [_tensor_json(m, t) for t in m.tensors],
            "aliases": m.aliases,
            "totals": [
                {"state": s, "dtype": d, "tensors": a, "elements": b, "bytes": c}
                for (s, d), (a, b, c) in totals(m).items()
            ],
            "extras": checkpoint.extras,
        }
    )


def _origin_json(checkpoint: Checkpoint) -> dict[str, Any]:
    m = checkpoint.manifest
    found = {"url": checkpoint.store.url, "format": checkpoint.format, "step": m.step}
    if checkpoint.format != "holdfast":
        return found | {
            "files": [
                {"path": path, "parts": len(sizes), "tensor_bytes": sum(sizes)}
                for path, sizes in foreign_files(m).items()
            ]
        }
    return found | {
        "run": m.run,
        "created": m.created,
        "mesh": dict(m.mesh),
        "files": [{"path": f.path, "rank": f.rank, "bytes": f.bytes} for f in m.files],
        "per_rank": m.per_rank,
    }


def _tensor_json(m: Manifest, t: TensorEntry) -> dict[str, Any]:
    sharding = to_sharding(m.shardings[t.sharding])
    return {
        "name": t.name,
        "dtype": t.dtype,
        "shape": list(t.shape),
        "state": t.state,
        "bytes": tensor_bytes(t),
        "sharding": _sharding_json(sharding),
    }


def _sharding_json(s: Sharding) -> dict[str, Any]:
    cuts = [{"dim": c.dim, "axes": list(c.axes)} for c in s.cuts]
    return {"text": str(s), "cuts": cuts, "on": {a: list(at) for a, at in s.on}}


def several_json(checkpoint: Checkpoint, names: list[str]) -> None:
    m = checkpoint.manifest
    print_json([_tensor_json(m, m.tensors[checkpoint.index(n)]) | {"name": n} for n in names])


def one_json(checkpoint: Checkpoint, name: str) -> None:
    m = checkpoint.manifest
    index = checkpoint.index(name)
    t = m.tensors[index]
    row = _tensor_json(m, t) | {"name": name}
    if checkpoint.format != "holdfast":
        row["parts"] = [
            {"start": list(box.start), "stop": list(box.stop), "places": places}
            for box, places in places_of(checkpoint, t)
        ]
        print_json(row)
        return
    held = drawing.held_boxes(m, t, m.placement)
    row["held"] = [
        {"start": list(b.start), "stop": list(b.stop), "ranks": list(ranks)} for b, ranks in held
    ]
    row["pieces"] = [
        {"file": f.path, "rank": f.rank, "start": list(b.start), "stop": list(b.stop),
         "from": first, "to": last}
        for f, b, first, last in pieces(m, index, [b for b, _ in held])
    ]  # fmt: skip
    print_json(row)
