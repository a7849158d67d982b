"""What a rank makes of its own replica for its group is what the others' images say, also when the
training's next step comes before it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.codec.stripes import Stripes, copy, rs
from holdfast.core.format.image import Image, plan_image
from holdfast.core.format.manifest import FileEntry
from holdfast.live.collecting import collect
from holdfast.live.saving.planning import SavePlan, new_plan
from holdfast.live.state.agreed import describe_tensors, merge_descriptions
from holdfast.live.state.carrying import CarriedCopies, CarryBuffer
from holdfast.live.state.named import Collected
from holdfast.live.state.snapshot import Copies, FillProgress
from holdfast.tiers.memory import replica
from holdfast.tiers.memory.replica import ReplicaGuard, replica_guard

EXTRAS = 4096


def trained(device: str = "cpu") -> tuple[Collected, Callable[[], None]]:
    """A state of many kinds of tensors, and the optimizer's next step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(500, 400), torch.nn.Linear(400, 300), torch.nn.Linear(300, 200)
    )
    model[1].weight.data = torch.randn(400, 300).t()
    model[2].to(torch.bfloat16)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()

    step()
    return collect({"model": model, "optim": optimizer}), step


@contextmanager
def windows(num_bytes: int) -> Iterator[None]:
    """Guards that are planned meanwhile are made in windows of that size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "WINDOW_BYTES", num_bytes)
        yield


class Replicas:
    """Ranks that hold the same; `images` are what they save."""

    def __init__(self, live: Collected, num_ranks: int) -> None:
        self.live = live
        agreement = merge_descriptions([describe_tensors(live)], [0] * num_ranks)
        self.plan: SavePlan = new_plan(agreement, "a digest")
        found = [self._image(rank) for rank in range(num_ranks)]
        self.files = [
            FileEntry(
                rank, str(rank), i.total_bytes, i.data_start, i.extras_start, i.table_start, ""
            )
            for rank, (i, _) in enumerate(found)
        ]
        self.images = [data for _, data in found]

    def _image(self, rank: int) -> tuple[Image, bytes]:
        pieces = self.plan.placement.pieces(rank)
        image = plan_image(self.plan.agreement.tensors, pieces, extras_bytes=EXTRAS)
        data = memoryview(bytearray(image.total_bytes))
        Copies.plan(image, self.plan.agreement.tensors, self.live, {}, data).run(
            FillProgress(), None
        )
        return image, bytes(data[: image.extras_start])

    def stripes(self, make: Callable[..., Stripes], number: int) -> Stripes:
        return make([f.bytes for f in self.files], number)

    def guard(self, stripes: Stripes, me: int) -> ReplicaGuard:
        made = replica_guard(self.plan, self.live, {}, {}, stripes, self.files, me)
        assert made is not None
        return made

    def expected(self, stripes: Stripes, me: int) -> memoryview:
        """Of the whole images at once."""
        kept = np.zeros(stripes.kept_bytes, np.uint8)
        size = stripes.block_bytes
        for c in stripes.contributions(me):
            block = np.zeros(size, np.uint8)
            data = np.frombuffer(self.images[c.source.member], np.uint8)
            part = data[c.source.start : c.source.stop]
            block[: len(part)] = part
            rows = {c.row: kept[c.at : c.at + size]}
            stripes.code.accumulate(rows, c.index, block, fresh=c.index == 0)
        return kept.data


@pytest.mark.parametrize("window", [64, 256], ids=lambda n: f"{n} KiB at a time")
@pytest.mark.parametrize(("make", "number"), [(copy, 2), (copy, 3), (rs, 1), (rs, 2)])
@settings(max_examples=20, deadline=None)
@given(when=st.floats(0.0, 1.0), me=st.integers(0, 3))
def test_what_is_kept_is_of_the_moment(
    window: int, make: Callable[..., Stripes], number: int, when: float, me: int
) -> None:
    """The step comes after any number of reads: what is left is read from where it was set aside."""
    live, step = trained()
    replicas = Replicas(live, 4)
    stripes = replicas.stripes(make, number)
    expected = replicas.expected(stripes, me)
    kept = memoryview(bytearray(b"\xaa" * stripes.kept_bytes))
    with windows(window << 10):
        guard = replicas.guard(stripes, me)
    carried = Stepping(guard.sources, int(when * (len(guard.sources) - 1)), step)
    guard.fill(kept, carried)
    assert carried.is_carried
    assert np.array_equal(kept, expected)
    guard.fill(kept)
    assert not np.array_equal(kept, expected)  # the state is another one now


class Stepping(CarriedCopies):
    """The training makes its next step when so many have been taken."""

    def __init__(self, sources: list[torch.Tensor], before: int, step: Callable[[], None]) -> None:
        super().__init__(sources, CarryBuffer(8 << 20), sound=lambda: True)
        self._before, self._step = before, step

    def take(self, number: int) -> torch.Tensor:
        if number == self._before:
            assert self.carry()
            self._step()
        return super().take(number)


def test_no_more_is_set_aside_than_is_read() -> None:
    """Whatever the windows are: else what fits in the room would not."""
    live, _ = trained()
    replicas = Replicas(live, 4)
    stripes = replicas.stripes(rs, 2)
    with windows(64 << 10):
        guard = replicas.guard(stripes, 0)
    read = sum(r.size for w in guard._windows for r in w.reads if r.is_live)
    more = sum(s.numel() * s.element_size() for s in guard.sources) - read
    row = 300 * 4  # of the tensor that lies transposed, which is read row by row
    assert 0 <= more <= 2 * row * len(guard._windows) < read // 4
