"""Lives of trainings, for all tests."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.tiers.records.writer_registry import WriterEntry
from tiers.memory.agents import stop
from tiers.memory.zygote import Lives

WRITERS_S = 120.0


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """One for all files of a worker: to import torch takes seconds."""
    lives = Lives(tmp_path_factory.mktemp("lives"))
    yield lives
    lives.close()


@pytest.fixture
def lives(zygote: Lives, tmp_path: Path) -> Iterator[Lives]:
    """Agents and writers are gone before the next test."""
    zygote.place = tmp_path
    yield zygote
    for node in tmp_path.glob("node*"):
        stop(node)
    until = time.monotonic() + WRITERS_S
    while any(is_at_work(mark) for mark in tmp_path.glob("root/log/*/*.writing")):
        assert time.monotonic() < until  # writers end by themselves
        time.sleep(0.05)


def is_at_work(mark: Path) -> bool:
    try:
        return msgspec.json.decode(mark.read_bytes(), type=WriterEntry).is_here()
    except FileNotFoundError:
        return False
