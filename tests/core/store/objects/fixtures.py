"""Servers for the tests of a worker, one of each kind, and fresh places in their buckets."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from core.store.objects.google_stub import GoogleStub
from core.store.objects.proxy import Proxy
from core.store.objects.servers import (
    AZURE_ENV,
    S3_ENV,
    Azurite,
    Moto,
    NotInstalled,
    S3rver,
    SeaweedFS,
)

_numbers = itertools.count(1)


def fresh() -> str:
    """A prefix that no test has used."""
    return f"{uuid.uuid4().hex[:8]}/{next(_numbers)}"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the servers want to hear, for this process and its children."""
    for name, value in (S3_ENV | AZURE_ENV).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """For tests that leave it alive.  It ends with its file: a tenth of a core goes to one that idles."""
    with SeaweedFS(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    with Moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def google() -> Iterator[GoogleStub]:
    with GoogleStub() as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    yield from _of_npm(Azurite, tmp_path_factory)


@pytest.fixture(scope="session")
def s3rver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3rver]:
    yield from _of_npm(S3rver, tmp_path_factory)


def _of_npm(kind: type, factory: pytest.TempPathFactory) -> Iterator[Any]:
    try:
        server = kind(factory.mktemp(kind.__name__))
    except NotInstalled as reason:
        pytest.skip(str(reason))
    with server:
        yield server


@pytest.fixture
def proxy(seaweed: SeaweedFS) -> Iterator[Proxy]:
    """Before SeaweedFS."""
    with Proxy(seaweed.endpoint) as found:
        yield found
