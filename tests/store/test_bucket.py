"""Addresses of buckets: what URLs and the environment may say, without a request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.store import open_store
from holdfast.store.bucket import address_of, connect


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def profile(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / ".aws").mkdir(exist_ok=True)
    (tmp_path / ".aws" / file).write_text(text)


def config(url: str) -> dict[str, Any]:
    return dict(connect(address_of(url), 10.0, repeat=True).config)


@pytest.mark.parametrize(
    ("url", "prefix", "opens"),
    [
        ("s3://b", "", "s3://b"),
        ("s3://b/", "", "s3://b"),
        ("s3://b/a/c/", "a/c/", "s3://b/a/c"),
        ("s3://b//a//c", "a/c/", "s3://b/a/c"),
        ("s3://b/a?region=eu-1", "a/", "s3://b/a?region=eu-1"),
        (
            "s3://b/a?endpoint=http://h:1&unsafe=yes",
            "a/",
            "s3://b/a?endpoint=http://h:1&unsafe=yes",
        ),
    ],
)
def test_an_address_and_its_usual_form(url: str, prefix: str, opens: str) -> None:
    address = address_of(url)
    assert (address.bucket, address.prefix, address.url) == ("b", prefix, opens)
    assert address_of(address.url) == address
    assert open_store(url).url == opens


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "names no bucket"),
        ("s3:///a", "names no bucket"),
        ("s3://me:hidden@b/a", "names no bucket"),
        ("s3://b?regoin=x", "unknown option 'regoin'(.|\\n)*did you mean 'region'"),
        ("gs://b?region=x", "unknown option 'region'"),
        ("s3://b?secret_access_key=hidden", "looks like a secret"),
        ("s3://b?sessionToken=hidden", "looks like a secret"),
        ("az://b?sas_key=hidden", "looks like a secret"),
        ("s3://b?unsafe=perhaps", "neither yes nor no"),
    ],
)
def test_what_is_refused(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        open_store(url)
    assert "hidden" not in str(error.value)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://there:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-2")
    found = config("s3://b")
    assert (found["endpoint"], found["region"]) == ("http://there:1", "eu-2")
    found = config("s3://b?endpoint=http://here:2&region=eu-3")
    assert (found["endpoint"], found["region"]) == ("http://here:2", "eu-3")


def test_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = "aws_access_key_id = {0}\naws_secret_access_key = s-{0}\n"
    profile(tmp_path, "credentials", f"[default]\n{keys.format('d')}[team]\n{keys.format('t')}")
    profile(tmp_path, "config", "[profile team]\nregion = eu-4\nendpoint_url = http://team:1\n")
    assert config("s3://b")["access_key_id"] == "d"
    team = config("s3://b?profile=team")
    assert (team["access_key_id"], team["secret_access_key"]) == ("t", "s-t")
    assert (team["region"], team["endpoint"]) == ("eu-4", "http://team:1")
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert config("s3://b")["access_key_id"] == "t"
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "e")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s-e")
    assert config("s3://b").get("access_key_id") != "d", "keys of the environment come first"


def test_a_profile_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no profile 'none'"):
        config("s3://b?profile=none")


def test_google_and_azure() -> None:
    assert config("gs://b")["bucket"] == "b"
    assert config("az://b?account=a&endpoint=http://h:1/a")["account_name"] == "a"
