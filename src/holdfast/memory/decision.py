"""What ranks say to each other of a snapshot, and what rank 0 makes of it."""

from __future__ import annotations

import msgspec

from holdfast.capture.exactness import Exactness
from holdfast.memory.node import words as w


class Filled(msgspec.Struct, frozen=True, array_like=True):
    """What a rank hands in: what goes into the manifest, and how its agent is reached."""

    written: bytes
    card: w.Card
    holding: str
    """What it holds of all tensors: the same for ranks that hold the same."""
    size: int
    """Of its image, in bytes; 0: it saves nothing."""
    budget: int
    """Of this job on its node, in bytes."""
    refusal: str = ""
    """Why its image is not in its agent's memory."""
    exactness: Exactness | None = None
    """If its image was copied from a replica."""
    memory: int = 0
    """Bytes that its image takes on its node, whether it saves anything or not."""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's: what became of a snapshot."""

    errors: dict[int, str]
    manifest: bytes = b""
    cards: tuple[w.Card, ...] = ()
    card_of: tuple[int, ...] = ()
    """By rank: which of the cards is its agent's."""
    class_of: tuple[int, ...] = ()
    """By rank: a number that ranks share which hold the same."""
    sizes: tuple[int, ...] = ()
    """By rank: bytes of its image; 0: it saves nothing."""
    memory: tuple[int, ...] = ()
    """By rank: bytes that its image takes on its node."""
    budgets: tuple[int, ...] = ()
    """Of this job on the nodes, as `cards`."""
    directly: str = ""
    """Why the save must get to storage without the agents."""


def decided(filled: list[Filled], manifest: bytes = b"") -> Decision:
    """What follows from what all ranks have handed in."""
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
