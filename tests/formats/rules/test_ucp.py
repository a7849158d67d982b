"""UCP's names as constructors of rules."""

from __future__ import annotations

import re

from holdfast.formats.rules.ucp import (
    fragment_params,
    params_to_average,
    regex,
    replicated_params,
    unique_params,
)
from holdfast.layout import Mesh
from holdfast.rules import RuleSet

TP = Mesh((("tp", 2),))


def test_constructors_give_rules() -> None:
    rules = RuleSet.parse(
        "\n".join(
            [
                "axes tp",
                replicated_params("**.norm"),
                params_to_average("**.alibi"),
                fragment_params("**.qkv", parts=(8, 2, 2)),
                fragment_params("**.uneven", widths=[(5, 3)]),
                fragment_params("**.proj", dim=1),
                fragment_params("embed", padded=(50, 64)),
                unique_params(regex(r"stage\d/x")),
            ]
        )
    )
    shapes = {"0.norm": (4,), "0.alibi": (4,), "0.qkv": (12, 2), "0.uneven": (8,), "0.proj": (4, 6),
              "embed": (50, 2)}  # fmt: skip
    for name, shape in shapes.items():
        rules.layout(name, shape, TP).check()
    stored = {n: rules.layout(n, s, TP).view(1).stored for n, s in shapes.items()}
    assert stored == {"0.norm": (4,), "0.alibi": (4,), "0.qkv": (6, 2), "0.uneven": (3,),
                      "0.proj": (4, 3), "embed": (32, 2)}  # fmt: skip
    assert [r.replica for r in rules.rules[:3]] == ["replicated", "averaged", "unique"]


def test_regex_matches_from_the_start_as_deepspeed_does() -> None:
    rules = RuleSet.parse("\n".join([unique_params(regex(r"\d+.norm|a/b")), "optional"]))
    for name in ("3.norm", "3xnorm.weight", "a/b", "a/bc", "x3.norm", "norm"):
        expected = re.match(r"\d+.norm|a/b", name) is not None
        assert (rules.rules[0].pattern.match(name) is not None) == expected, name
