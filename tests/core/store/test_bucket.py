"""Addresses of buckets: what URLs and the environment may say, without a request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.storage_deadlines import opening
from holdfast.core.store.bucket import address_of, connect
from holdfast.errors import HoldfastError, UsageError
from holdfast.store import open_store


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
        ("s3://b?unsafe=perhaps", "must be yes or no"),
        ("s3://b?pwd=hidden", "looks like a secret"),
        ("s3://b?auth=hidden", "looks like a secret"),
        ("s3://b?X-Amz-hidden9=1", "unknown option"),
        ("s3://b?hidden9", "unknown option"),
        ("s3://b?regoin=hidden", "unknown option 'regoin'"),
        ("s3://me:hid/hidden@b/a", "names no bucket"),
        ("s3://b/a#hidden", "has more than that"),
        ("s3://b?region=a?secret=hidden", "region must be one word"),
        ("s3://b?region=http://me:hidden@h", "region must be one word"),
        ("s3://b?unsafe=hidden", "must be yes or no"),
        ("s3://b?endpoint=http://me:hidden@h:1", "endpoint has more than a host"),
        ("gs://b?endpoint=http://hidden@h:1", "endpoint has more than a host"),
        ("az://b?endpoint=http://h:1/%3Fsig%3Dhidden", "endpoint has more than a host"),
        ("S3://b/x?SECRET=hidden", "it has no scheme"),
        ("s3a://me:hidden@b/x", "unknown scheme 's3a'"),
        ("swift://h/x?token=hidden", "unknown scheme 'swift'"),
        ("https://b.s3.amazonaws.com/x?X-Amz-Signature=hidden", "unknown scheme 'https'"),
        ("s3:/me:hidden@b", "with one slash"),
        ("file://me:hidden@h/x", "names a host"),
    ],
)
def test_what_is_refused(url: str, says: str) -> None:
    """No message says what was secret."""
    with pytest.raises(UsageError, match=says) as error:
        open_store(url)
    assert "hidden" not in str(error.value) + repr(error.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot get http://me:pw@h:1/b", "cannot get http://...@h:1/b"),
        ("'s3a://pw@b/x' and 'http://a:b@c'", "'s3a://...@b/x' and 'http://...@c'"),
        ("https://h/x?a=1&X-Amz-Signature=ab%2F&b=2", "https://h/x?a=1&X-Amz-Signature=...&b=2"),
        ("swift://h?pass=pw", "swift://h?pass=..."),
        ("'s3:/me:pw@b/x' and file:///me:pw@h/x", "'s3:/...@b/x' and file:///...@h/x"),
        ("file:///a@b/c and a@b", "file:///a@b/c and a@b"),
        ("s3://b/x?endpoint=http://h:1&unsafe=yes", "s3://b/x?endpoint=http://h:1&unsafe=yes"),
    ],
)
def test_no_error_shows_a_secret_of_a_url(text: str, shown: str) -> None:
    error = UsageError(text, hint=text)
    assert (error.message, error.hint, error.args) == (shown, shown, (shown,))


def test_an_odd_folder_keeps_its_name() -> None:
    address = address_of("s3://b/a%23b%3Fc%25")
    assert address.prefix == "a#b?c%/"
    assert address_of(address.url) == address


def test_the_environment_s_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore says which URL it could not reach."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hidden@127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    with opening(2):
        store = open_store("s3://b/x")
    with pytest.raises(HoldfastError, match=r"127\.0\.0\.1") as error:
        store.get("a")
    assert "hidden" not in store.url + str(error.value) + repr(error.value)


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
