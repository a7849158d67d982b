"""Lists in messages say how much they leave out."""

from __future__ import annotations

import pytest

from holdfast.base.text import first_of, listed


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("", ""),
        ("a", "a"),
        ("abc", "a, b, c"),
        ("abcd", "a, b, c and 1 more"),
        (range(1003), "0, 1, 2 and 1,000 more"),
    ],
)
def test_a_row_of_names(names: object, text: str) -> None:
    assert listed(names) == text


def test_lines() -> None:
    assert first_of("ab", 2) == ["a", "b"]
    assert first_of((text for text in "abcd"), 1) == ["a", "and 3 more"]
