"""Messages by which ranks agree on a snapshot: what each hands in, and what rank 0 decides from
that."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.base.wire import WireError
from holdfast.live.saving.exactness import REPLICA, Exactness
from holdfast.tiers.memory.node import messages as w


class Filled(msgspec.Struct, frozen=True, array_like=True):
    """The message that a rank hands in: what goes into the manifest, and how its agent is
    reached."""

    written: bytes
    card: w.Card
    holding: str
    """Digest of which parts of all tensors it holds."""
    size: int
    """Bytes of its image; 0: it saves nothing."""
    budget: int
    """Bytes of memory that this job may take on its node."""
    refusal: WireError | None = None
    """Why its image is not in its agent's memory; None if it is, or it saves nothing."""
    exactness: Exactness | None = None
    """Exactness of its image, if it was copied from a replica; else None."""
    memory: int = 0
    """Bytes that its image takes on its node, whether it saves anything or not."""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's decision: what became of a snapshot."""

    errors: dict[int, WireError]
    manifest: bytes = b""
    cards: tuple[w.Card, ...] = ()
    card_of: tuple[int, ...] = ()
    """Index in `cards` of each rank's agent, by rank."""
    class_of: tuple[int, ...] = ()
    """A number for each rank, by rank: the same for ranks that hold the same parts."""
    sizes: tuple[int, ...] = ()
    """Bytes of each rank's image, by rank; 0: it saves nothing."""
    memory: tuple[int, ...] = ()
    """Bytes that each rank's image takes on its node, by rank."""
    budgets: tuple[int, ...] = ()
    """Bytes of memory that this job may take on each node, in the order of `cards`."""
    directly: str = ""
    """Why the save must get to storage without the agents; empty if they can do it."""


def decided(filled: list[Filled], manifest: bytes = b"") -> Decision:
    """Return the decision that follows from what all ranks have handed in."""
    cards = {card: number for number, card in enumerate(dict.fromkeys(f.card for f in filled))}
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(f.holding for f in filled))}
    budgets = {f.card: f.budget for f in filled}
    return Decision(
        {},
        manifest,
        tuple(cards),
        tuple(cards[f.card] for f in filled),
        tuple(kinds[f.holding] for f in filled),
        tuple(f.size for f in filled),
        tuple(max(f.size, f.memory) for f in filled),
        tuple(budgets[card] for card in cards),
    )


def exactness_note(ranks: Iterable[Exactness | None]) -> dict[str, str]:
    """Return the manifest's entry for the worst exactness of all ranks.  None stands for a rank that
    copied the live state; {} if all did."""
    found = [one for one in ranks if one is not None]
    if not found:
        return {}
    worst = Exactness(
        all(one.is_exact for one in found),
        max(one.drift for one in found),
        min(one.compared for one in found),
    )
    return {REPLICA: str(worst)}
