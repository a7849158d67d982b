"""What is said of a quantised state that a layout cannot take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.errors import StateMismatch
from holdfast.live.restore.composite_states import description_of, make_state

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("signed", [True, False])
def test_the_reason_is_of_the_state_that_is_alike(signed: bool) -> None:
    """Not that the optimizer's other state (the squares, without a sign) has another context."""
    torchao = pytest.importorskip("torchao.optim")
    p = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer: Any = torchao.AdamW8bit([p])
    said = description_of(optimizer._new_buffer(p, signed), "x")
    assert said is not None
    saved = {**said, "parts": {**said["parts"], "scale": "in blocks of 4 x 64 elements"}}
    with pytest.raises(StateMismatch) as caught:
        make_state("x", saved, optimizer, p, lambda name: None)
    assert "with scale in blocks of 4 x 64 elements, here " in str(caught.value)
