"""The source of Python's own standard library as training bytes, and a loader that can be put anywhere.

Nothing is downloaded, and every run of one Python sees the same bytes. The global batch of step k
is a function of the seed and k alone, so it is the same however many data-parallel ranks share it,
and the loader's whole state is k.
"""

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

ELSEWHERE = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
}  # not the library, or not always installed


@cache
def library_bytes(limit_bytes: int) -> bytes:
    """The first `limit_bytes` bytes of the standard library's source files, by sorted path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        path for path in root.rglob("*.py") if ELSEWHERE.isdisjoint(path.relative_to(root).parts)
    )
    text = bytearray()
    for path in paths:
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            return bytes(text[:limit_bytes])
    raise ValueError(
        f"the Python sources under {root} are {len(text)} bytes, fewer than the {limit_bytes} wanted"
    )


class Loader:
    """An endless iterator over this rank's rows of the global batches.

    It gives (inputs, targets), each of shape (batch / num_ranks, context).
    """

    def __init__(
        self,
        *,
        batch: int,
        context: int,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        limit_bytes: int = 4 << 20,
    ) -> None:
        if batch % num_ranks:
            raise ValueError(
                f"a global batch of {batch} cannot be shared evenly by {num_ranks} data-parallel ranks"
            )
        self.context, self.batch, self.seed = context, batch, seed
        self.rows = slice(rank * batch // num_ranks, (rank + 1) * batch // num_ranks)
        self.text = torch.frombuffer(bytearray(library_bytes(limit_bytes)), dtype=torch.uint8)
        self.step = 0

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed((self.seed << 32) + self.step)
        starts = torch.randint(len(self.text) - self.context, (self.batch,), generator=generator)[
            self.rows
        ]
        self.step += 1
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.seed = state["step"], state["seed"]
