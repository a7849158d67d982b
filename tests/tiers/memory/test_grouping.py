"""Which scheme is chosen, why, and what nodes have memory for; without processes."""

from typing import Any

import pytest

from holdfast import events
from holdfast.core.codec.stripes import Stripes
from holdfast.errors import OutOfSpace
from holdfast.policy.survival import none, rs
from holdfast.tiers.memory.decision import Decision, Filled, decided
from holdfast.tiers.memory.grouping import (
    Chosen,
    Grouping,
    check_room,
    chosen_for,
    kept_bytes,
    lack,
)
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.protect import guard_bytes

MB = 1_000_000


def told(nodes: str, holdings: str = "", *, sizes: Any = None, budget: int = 1 << 40) -> Decision:
    """`aab`: the nodes of ranks; `xyx`: what they hold, all different if it is not said."""
    kinds = holdings or [str(r) for r in range(len(nodes))]
    each = sizes or [MB] * len(nodes)
    cards = {n: w.Card(n, f"{n}:1", "t") for n in nodes}
    return decided([Filled(b"", cards[n], k, s, budget) for n, k, s in zip(nodes, kinds, each)])


@pytest.mark.parametrize(
    ("nodes", "holdings", "scheme", "groups", "why"),
    [
        ("aaaa", "", "none", [(0,), (1,), (2,), (3,)], "one node"),
        ("ab", "", "copy(2)", [(0, 1)], "two nodes"),
        ("abcd", "", "parity", [(0, 1, 2, 3)], "4 nodes: parity survives the loss of one"),
        ("abcd", "", "parity", [(0, 1, 2, 3)], "agents of a group exchange"),
        ("abcd", "xyxy", "parity", [(0, 2), (1, 3)], "each rank protects from its own replica"),
        ("aabc", "", "parity", [(0, 2), (1, 3)], "3 nodes"),
        ("aaab", "", "none", [(0,), (1,), (2,), (3,)], "rank 1 finds 0 others"),
    ],
)
def test_auto(nodes: str, holdings: str, scheme: str, groups: Any, why: str) -> None:
    found = chosen_for("auto", told(nodes, holdings))
    assert (str(found.scheme), found.groups) == (scheme, groups)
    assert why in found.why


def test_what_was_asked_for_and_cannot_be_had() -> None:
    found = chosen_for("rs(2)", told("abb"))
    assert (found.wanted, found.scheme) == (rs(2), none())
    assert "'rs(2)' needs groups of 3 ranks on different nodes" in found.why
    assert chosen_for("rs(2)", told("ab")).scheme == rs(1)


def needed(nodes: str, scheme: str, sizes: list[int]) -> dict[str, int]:
    """By node, from the stripes of one group of all ranks."""
    (group,) = chosen_for(scheme, told(nodes, sizes=sizes)).groups
    k, m = {"copy": (1, 1), "parity": (len(nodes) - 1, 1), "rs(2)": (len(nodes) - 2, 2)}[scheme]
    kept = guard_bytes(Stripes(tuple(sizes[r] for r in group), k, m))
    return {n: 2 * (sizes[r] + kept) for r, n in enumerate(nodes)}


@pytest.mark.parametrize("scheme", ["copy", "parity", "rs(2)"])
def test_the_budget_is_enough_to_the_byte(scheme: str) -> None:
    sizes = [5 * MB, 4 * MB, 6 * MB, 5 * MB]
    most = max(needed("abcd", scheme, sizes).values())
    enough = told("abcd", sizes=sizes, budget=most)
    check_room(enough, chosen_for(scheme, enough))
    short = told("abcd", sizes=sizes, budget=most - 1)
    with pytest.raises(OutOfSpace, match=f"node of rank 2 take {most} bytes .* is {most - 1} byt"):
        check_room(short, chosen_for(scheme, short))


def test_images_take_whole_pages() -> None:
    """Of one that saves nothing, too."""
    card = w.Card("a", "a:1", "t")
    filled = [
        Filled(b"", card, "x", size, 20_480, memory=m) for size, m in ((5000, 8192), (0, 4096))
    ]
    assert "take 24576 bytes" in lack(decided(filled), none(), [(0,), (1,)])


def test_auto_gives_protection_up_before_it_gives_up_snapshots() -> None:
    budget = 3 * MB
    tight = told("abcd", sizes=[MB] * 4, budget=2 * MB)
    found = chosen_for("auto", tight)
    assert (found.wanted, found.scheme) == (rs(1), none())
    assert "with parity, snapshots of the 1 rank(s) on the node of rank 0 take" in found.why
    assert lack(tight, none(), found.groups) == ""
    assert chosen_for("auto", told("abcd", sizes=[MB] * 4, budget=budget)).scheme == rs(1)
    nothing = told("abcd", sizes=[MB] * 4, budget=MB)
    with pytest.raises(OutOfSpace, match="budget is 1000000 bytes"):
        check_room(nothing, chosen_for("auto", nothing))


def test_those_that_save_nothing_are_no_members() -> None:
    decision = told("abcd", sizes=[MB, 0, MB, MB])
    found = chosen_for("parity", decision)
    (group,) = found.groups
    assert kept_bytes(decision, rs(1), group) == guard_bytes(Stripes((MB, MB, MB), 2, 1))
    only = told("ab", sizes=[MB, 0])
    assert kept_bytes(only, rs(1), (0, 1)) == 0


def test_changes_are_told_once() -> None:
    said: list[str] = []
    seen: list[events.Event] = []
    grouping = Grouping("parity", said.append)
    with events.listen(seen.append):
        for nodes in ("abc", "abc", "aaab", "aaab", "abc"):
            found: Chosen = grouping.find(told(nodes))
    assert found.scheme == rs(1)
    assert [(e.name, e.fields["kept"]) for e in seen] == [
        ("memory.redundancy", "parity"),
        ("memory.redundancy", "none"),
        ("memory.weaker", "none"),
        ("memory.redundancy", "parity"),
    ]
    (text,) = said
    assert "do not survive the loss of a node: parity cannot be had" in text
    assert "rank 1 finds 0 others" in text
