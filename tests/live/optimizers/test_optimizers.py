"""Every optimizer in every layout comes back bit for bit on three layouts, or is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from .driving import matrix
from .zoo import ZOO

pytestmark = [pytest.mark.soak, pytest.mark.distributed, pytest.mark.timeout(3600)]
PACKAGES = {
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    **dict.fromkeys(
        (
            "SOAP",
            "Shampoo",
            "Lion",
            "ScheduleFreeAdamW",
            "Prodigy",
            "Adan",
            "CAME",
            "Lamb",
            "AdEMAMix",
            "MARS",
            "Kron",
        ),
        "pytorch_optimizer",
    ),
}
"""Packages that have an optimizer, by the first word of its name."""


def _is_there(name: str) -> bool:
    package = PACKAGES.get(name.split()[0])
    return package is None or importlib.util.find_spec(package) is not None


def test_optimizers_are_equal_or_refused(tmp_path: Path) -> None:
    names = [name for name in ZOO if _is_there(name)]
    lines = matrix(tmp_path, ["holdfast"], names, limit_s=3000)
    bad = [line for line in lines if line["verdict"] in ("wrong", "crash")]
    assert not bad, "\n".join(f"{line['cell']}: {line['verdict']}: {line['why']}" for line in bad)
    equal = {line["cell"][0] for line in lines if line["verdict"] == "equal"}
    assert equal == set(names)  # in some layout at least
