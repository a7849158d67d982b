"""Lives of trainings, for the tests that ask for `lives`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.memory.node import words as w
from holdfast.memory.node.client import Client
from memory.agents import await_gone, pid_of
from memory.zygote import Lives


@pytest.fixture(scope="package")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    lives = Lives(tmp_path_factory.mktemp("lives"))
    yield lives
    lives.close()


@pytest.fixture
def lives(zygote: Lives, tmp_path: Path) -> Iterator[Lives]:
    zygote.place = tmp_path
    yield zygote
    for node in tmp_path.glob("node*"):
        client = Client(node, deadline_s=30.0)
        if client.is_there():
            client.ask(w.Stop(free=True))
            await_gone(pid_of(node))
