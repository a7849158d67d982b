"""Labels that wait for a commit, beside a plain account of who has which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.live.saving.labels import PendingLabels

GIVE, COMMIT, END, FORGET = range(4)
DEEDS = st.lists(
    st.tuples(st.sampled_from([GIVE, GIVE, COMMIT, END, FORGET]), st.integers(0, 3), st.booleans())
)


class Account:
    """What each label names, by going through all that has happened, again and again."""

    def __init__(self) -> None:
        self.given: list[tuple[str, int]] = []
        self.written: dict[str, int] = {}

    def commit(self, step: int) -> None:
        """The label names the step, unless it was given to a committed one since."""
        for label in {label for label, _ in self.given}:
            places = [n for n, one in enumerate(self.given) if one == (label, step)]
            if places:
                self.written[label] = step
                done = [
                    n for n, one in enumerate(self.given) if one[0] == label and n <= places[-1]
                ]
                self.given = [one for n, one in enumerate(self.given) if n not in done]


@given(DEEDS)
def test_the_last_step_that_is_committed_has_the_label(deeds: list[tuple[int, int, bool]]) -> None:
    """Of those to which it was given, one after the other, in whichever order they are committed."""
    pending, account = PendingLabels(), Account()
    written: dict[str, int] = {}
    coming = {number: number for number in range(4)}  # each is saved once
    for number, step in coming.items():
        pending.begin(number, step)
    for deed, step, is_first in deeds:
        label = "best" if is_first else "last"
        if deed == GIVE:
            assert pending.give(label, step) == (step in coming)
            account.given += [(label, step)] if step in coming else []
        elif deed == FORGET:
            pending.forget(label)
            account.given = [one for one in account.given if one[0] != label]
        elif coming.pop(step, None) is None:
            assert pending.end(step, step) == []
        elif deed == COMMIT:
            written |= dict.fromkeys(pending.commit(step, step), step)
            account.commit(step)
            assert pending.end(step, step) == []
        else:
            lost = {label for label, of in account.given if of == step}
            account.given = [one for one in account.given if one[1] != step]
            assert set(pending.end(step, step)) == lost
        assert written == account.written


def test_two_saves_of_one_step() -> None:
    """A label waits until the last of them has failed; the first that is committed has it."""
    pending = PendingLabels()
    for number in (1, 2):
        pending.begin(number, 200)
    assert pending.give("best", 200)
    assert pending.end(1, 200) == []
    assert pending.commit(2, 200) == ["best"]
    assert not pending.give("best", 200)  # it is there: the notes have the label
    assert pending.end(2, 200) == []


def test_a_step_that_is_saved_anew_keeps_its_labels() -> None:
    """If that fails, nothing is told: they name its number all along."""
    pending = PendingLabels()
    for number, fails in enumerate((False, True)):
        assert not pending.give("best", 7)
        pending.keep(7, ["best", "last", "gone"])
        pending.forget("gone")
        pending.begin(number, 7)
        assert pending.give("best", 7)
        if fails:
            assert pending.end(number, 7) == ["best"]
        else:
            assert pending.commit(number, 7) == ["best", "last"]
            assert pending.end(number, 7) == []
    pending.begin(2, 7)
    assert pending.commit(2, 7) == []
