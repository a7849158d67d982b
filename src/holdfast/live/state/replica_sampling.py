"""Comparing replicas again at each save, when they were proved equal once (`holdfast.live.state.replicas`).

Replicas may be equal at the first save and go apart later: experts of one name that begin with the same
values, sums of a metric that begin with zero, a gradient that is not shared.  To digest all of them at each
save would cost a pass over the state.  So of each class (a sharding, a part), at each save:

    small tensors     whole, up to `SAMPLED_WHOLE_BYTES` each, `EACH_BYTES` in all: buffers, scalars, biases
    the others        a tenth of them, the next tenth at the next save: small ones whole, of large ones
                      `RUNS` runs of `RUN_BYTES`, further on each time

A tensor that is another one on some rank is so found within ten saves; single elements of a large one may
be found late.  What is taken follows from the plan alone, so it is the same on all ranks that hold a class.
One digest for each class goes with what each rank says before a save (`ReadyToSave`), so that no rank waits
for another message; only where these differ are single tensors compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.core.codec.digest import digest
from holdfast.live.state.agreed import Class, Sample, SampleRow
from holdfast.live.state.devices import Moment, after, on_stream
from holdfast.live.state.named import LiveTensor
from holdfast.live.state.snapshot import SetAside

SAMPLED_WHOLE_BYTES = 64 << 10
EACH_BYTES = 2 << 20
EACH_TENSORS = 256
ROUNDS = 10
"""Number of saves after which each tensor has been looked at."""
RUNS = 8
RUN_BYTES = 1 << 10
BOX = 16
"""Most elements along a dim of what is taken of a large tensor that is not contiguous."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """A tensor's part that other ranks hold as well."""

    name: str
    index: int
    """Number of the tensor in the plan."""
    kind: Class

    @property
    def part(self) -> int:
        return self.kind[1]


def value_of(t: LiveTensor, kept: SetAside) -> torch.Tensor:
    """This rank's part of a tensor, the first if it has several, as it was at the call."""
    return kept.get((t.name, 0), t.placed.local)


@dataclass
class Sampler:
    """Takes the samples of this rank's replicas; knows how far the rounds are."""

    round: int = 0
    _each: list[Replicated] = field(default_factory=list)
    _tenths: list[list[Replicated]] = field(default_factory=lambda: [[] for _ in range(ROUNDS)])
    _taken: dict[Class, list[tuple[NDArray[np.uint8], list[tuple[int, int, int]]]]] = field(
        default_factory=dict
    )
    """Contents of the last sample, by class: bytes, and (tensor number, part, length) in them."""
    _views: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Small tensors that lie where they did, as bytes."""

    def arrange(self, held: Iterable[Replicated], tensors: Mapping[str, LiveTensor]) -> None:
        """Take samples of these from now on."""
        classes: dict[Class, list[tuple[bool, int, int, Replicated]]] = {}
        for one in held:
            size = tensors[one.name].placed.local.nbytes
            classes.setdefault(one.kind, []).append((not one.kind[2], size, one.index, one))
        self._each, self._tenths = [], [[] for _ in range(ROUNDS)]
        self._views.clear()
        for kind, rows in classes.items():
            rows.sort(key=lambda row: row[:3])
            total = 0
            for position, (_, size, _, one) in enumerate(rows):
                total += size
                if size <= SAMPLED_WHOLE_BYTES and total <= EACH_BYTES and position < EACH_TENSORS:
                    self._each.append(one)
                else:
                    self._tenths[(position + abs(kind[0])) % ROUNDS].append(one)

    def take(
        self, tensors: Mapping[str, LiveTensor], kept: SetAside, ready: Moment | None
    ) -> Sample:
        """Take this round's sample of the state at the call; `ready`: its devices then."""
        pieces: defaultdict[tuple[Class, torch.device], list[tuple[Replicated, torch.Tensor]]]
        pieces = defaultdict(list)
        for one in (*self._each, *self._tenths[self.round % ROUNDS]):
            local = value_of(tensors[one.name], kept)
            known = self._views.get(one.name)
            if known is not None and known[0] is local:
                pieces[one.kind, known[1].device].append((one, known[1]))
            elif local.numel():
                pieces[one.kind, local.device].append((one, self._seen(one.name, local)))
        streams: dict[torch.device, torch.Stream] = {}
        self._taken = {}
        for (kind, device), parts in pieces.items():
            if device.type == "cpu":
                taken = self._joined(parts)
            else:
                if device not in streams:
                    streams[device] = after(ready, device, "samples")
                with on_stream(streams[device]):
                    taken = self._joined(parts)
            self._taken.setdefault(kind, []).append(taken)
        return self.round, {kind: _digest(taken) for kind, taken in self._taken.items()}

    def _seen(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return a large tensor itself, for its excerpt takes a stream; of a small one the bytes, which
        are remembered if they are a view of it."""
        is_view = local.is_contiguous() and not (local.is_complex() or local.is_neg())
        if not is_view or local.nbytes > SAMPLED_WHOLE_BYTES:
            return local
        taken = excerpt(local, 0)
        self._views[name] = local, taken
        return taken

    def _joined(
        self, parts: list[tuple[Replicated, torch.Tensor]]
    ) -> tuple[NDArray[np.uint8], list[tuple[int, int, int]]]:
        turn = self.round // ROUNDS
        taken = [one if _is_bytes(one) else excerpt(one, turn) for _, one in parts]
        lengths = [(one.index, one.part, len(data)) for (one, _), data in zip(parts, taken)]
        return torch.cat(taken).cpu().numpy(), lengths

    def rows(self, kinds: Iterable[Class]) -> list[tuple[Class, list[SampleRow]]]:
        """Digests of the single tensors of some classes in the last sample."""
        found: list[tuple[Class, list[SampleRow]]] = []
        for kind in kinds:
            rows: list[SampleRow] = []
            for data, lengths in self._taken.get(kind, ()):
                at = 0
                for index, part, length in lengths:
                    rows.append((index, part, digest(data[at : at + length].data)))
                    at += length
            found.append((kind, rows))
        return found


def _is_bytes(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.ndim == 1 and tensor.nbytes <= SAMPLED_WHOLE_BYTES


def excerpt(local: torch.Tensor, turn: int) -> torch.Tensor:
    """The bytes that are taken of a tensor: all of a small one, others of a large one at each turn."""
    if local.nbytes > SAMPLED_WHOLE_BYTES:
        if local.is_contiguous():
            stride = local.numel() // RUNS
            run = RUN_BYTES // local.element_size()
            at = turn * run % (stride - run + 1)
            local = local.reshape(-1)[: stride * RUNS].view(RUNS, stride)[:, at : at + run]
        else:
            starts = [turn * BOX % max(size - BOX + 1, 1) for size in local.shape]
            local = local[tuple(slice(start, start + BOX) for start in starts)]
    flat = local.detach().reshape(-1)
    if flat.is_complex() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    return flat.contiguous().view(torch.uint8)


def _digest(taken: list[tuple[NDArray[np.uint8], list[tuple[int, int, int]]]]) -> int:
    if len(taken) == 1:
        return digest(taken[0][0].data)
    return digest(b"".join(data.tobytes() for data, _ in taken))


def differing_classes(samples: list[Sample | None]) -> tuple[int, list[Class]]:
    """On rank 0: the number of the next round, and the classes of which ranks have sampled other bytes.
    Nothing is compared unless all have taken the sample of one round."""
    taken = [one for one in samples if one is not None]
    following = 1 + max((one[0] for one in taken), default=-1)
    if len(taken) < len(samples) or len({one[0] for one in taken}) != 1:
        return following, []
    return following, differing(digests for _, digests in taken)


def differing(each: Iterable[Mapping[Class, int]]) -> list[Class]:
    """The classes of which two ranks have other digests."""
    first: dict[Class, int] = {}
    found: dict[Class, None] = {}
    for digests in each:
        for kind, value in digests.items():
            if first.setdefault(kind, value) != value:
                found[kind] = None
    return list(found)
