"""Whether dense gradients should be packed without loss before they are written: how small, and how fast.

    pip install zstandard lz4
    python -m bench.claims.packing

Gradients of a GPT (examples/gpt.py) that has trained for some steps on this repository's own text, in
float32 and bfloat16, whole and by byte planes (the first bytes of all elements, then the second ones, ...).
Beside them what `holdfast.compression.rounded` does with float32 gradients of bfloat16's values: it copies
and checks each, and what it leaves is half.
Speed is that of one core, of the gradients' own bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import ROOT, report, reporting, row

CLAIMS = (
    Claim(
        "A core copies and checks 2 GB/s of gradients that are declared rounded.",
        r"rounded to bfloat16, checked",
        at_least=2000,
        unit="MB/s",
    ),
)
STEPS = 60


def gradients() -> Any:
    """Of the last step, flat."""
    import torch
    import torch.nn.functional as F  # noqa: N812  its usual name

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT, Shape

    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = Shape()
    text = b"".join(p.read_bytes() for p in sorted((ROOT / "docs").rglob("*.md")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = GPT(shape)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optim.zero_grad()
        at = torch.randint(len(data) - shape.context - 1, (8,)).tolist()
        tokens = torch.stack([data[a : a + shape.context + 1] for a in at])
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optim.step()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def packed() -> list[dict[str, Any]]:
    """Every way to pack: its size, as a part, and its speed in bytes per second (the best of three)."""
    import lz4.frame
    import numpy as np
    import torch
    import zstandard

    grad = gradients()
    codecs: dict[str, Callable[[bytes], bytes]] = {
        "zstd -1": zstandard.ZstdCompressor(level=1).compress,
        "zstd -3": zstandard.ZstdCompressor(level=3).compress,
        "lz4": lz4.frame.compress,
    }
    found = []
    for dtype, raw in ((torch.float32, np.uint32), (torch.bfloat16, np.uint16)):
        bits = grad.to(dtype).view({4: torch.int32, 2: torch.int16}[dtype.itemsize]).numpy()
        table = bits.view(raw).view(np.uint8).reshape(-1, dtype.itemsize)
        kind = str(dtype).removeprefix("torch.")
        for planes in (False, True):
            for name, compress in codecs.items():
                best, size = float("inf"), 0
                for _ in range(3):
                    began = time.perf_counter()
                    data = np.ascontiguousarray(table.T) if planes else table
                    size = len(compress(data.tobytes()))
                    best = min(best, time.perf_counter() - began)
                found.append({"gradients": kind, "planes": planes, "codec": name,
                              "part": size / table.size, "speed": table.size / best})  # fmt: skip
    return [*found, rounded(grad.bfloat16().float())]


def rounded(grad: Any) -> dict[str, Any]:
    """What holdfast does with gradients that are declared rounded."""
    import torch

    from holdfast.tiers.records.places import round_into

    into = torch.empty_like(grad, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        assert not round_into(into, grad)
        best = min(best, time.perf_counter() - began)
    return {"gradients": "float32", "planes": False, "codec": "rounded to bfloat16, checked",
            "part": into.nbytes / grad.nbytes, "speed": grad.nbytes / best}  # fmt: skip


def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        row(
            f"{f['gradients']} gradients, {f['codec']}{', by byte planes' * f['planes']}",
            f"{100 * f['part']:.1f} % of their size",
            "unpacked",
            f["speed"] / 1e6,
            unit=" MB/s",
        )
        for f in found
    ]


def main() -> None:
    args = reporting(__doc__).parse_args()
    began = time.time()
    found = packed()
    report(CLAIMS, __doc__, args, {"packed": found}, rows(found), began)


if __name__ == "__main__":
    main()
