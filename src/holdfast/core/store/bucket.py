"""Addresses of buckets: a URL and the environment, translated to obstore's configuration.

    s3://bucket/runs/gpt                                     AWS_REGION, AWS_ACCESS_KEY_ID and so on
    s3://bucket/runs/gpt?endpoint=http://127.0.0.1:8333      any store that speaks S3
    s3://bucket/runs/gpt?profile=team                        from ~/.aws, as AWS_PROFILE
    gs://bucket/runs/gpt                                     GOOGLE_APPLICATION_CREDENTIALS, or the host's
    az://container/runs/gpt                                  AZURE_STORAGE_ACCOUNT_NAME, ..._KEY, ...

Background processes open the store again from its URL and the inherited environment, so these two hold the
whole address.  A URL holds no secrets: it is written into logs, messages and job files.
"""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from holdfast.base.errors import SECRET, UsageError
from holdfast.base.suggest import did_you_mean

_COMMON = {"endpoint", "anonymous", "unsafe"}
_OPTIONS = {
    "s3": _COMMON | {"region", "profile", "virtual_host"},
    "gs": _COMMON,
    "az": _COMMON | {"account", "emulator"},
}
_FLAGS = {"anonymous", "unsafe", "virtual_host", "emulator"}
_PLAIN = {"region": re.compile(r"[\w.-]*"), "account": re.compile(r"[\w.-]*")}
"""Options whose values are single words, and their patterns."""
_YES, _NO = {"1", "true", "yes", ""}, {"0", "false", "no"}

_REQUEST_S = 30.0
"""Longest time of one request with its body; shorter if the operation's limit is."""
RETRY_S = 600.0
"""How long a failing request is repeated if the store has no time limit."""


class BucketAddress(NamedTuple):
    """A bucket, and the prefix in it that one store uses."""

    scheme: str
    bucket: str
    prefix: str
    """Prefix of all object names: empty, or with a final `/`."""
    options: Mapping[str, str]

    @property
    def url(self) -> str:
        """Canonical URL; it opens the same store."""
        path = re.sub("[%?#]", lambda m: quote(m[0]), f"{self.bucket}/{self.prefix}".rstrip("/"))
        query = "?" + urlencode(self.options, safe=":/") if self.options else ""
        return f"{self.scheme}://{path}{query}"

    def flag(self, name: str) -> bool:
        """True if a yes-or-no option is given as yes."""
        return self.options.get(name, "no").lower() in _YES


def address_of(url: str) -> BucketAddress:
    """Parse a URL.  UsageError if it names no bucket, has an unknown option, or holds a secret."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    bucket, _, path = rest.partition("/")
    if not bucket or {*"@:#"} & {*bucket} or "#" in rest + query:
        raise UsageError(
            f"cannot open a URL that begins with '{scheme}://': it names no bucket, or has more than that, "
            "a folder and options",
            hint=f"{scheme}://bucket/a/folder, with %23 for a #; credentials come from the environment",
        )
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        _check_option(scheme, name, value, f"{scheme}://{rest}")
    parts = [part for part in unquote(path).split("/") if part]
    return BucketAddress(scheme, bucket, "".join(f"{part}/" for part in parts), options)


def _check_option(scheme: str, name: str, value: str, url: str) -> None:
    """UsageError for an unknown option or a bad value; the value, a possible secret, is not shown."""
    known = _OPTIONS[scheme]
    if name not in known and SECRET.search(name):
        raise UsageError(
            f"cannot open '{url}': the option {name[:40]!r} looks like a secret, and URLs are written into "
            "logs",
            hint="give credentials by the environment, a profile, or the role of the machine",
        )
    if name not in known:
        shown = repr(name) if re.fullmatch("[a-z_]{1,40}", name) else "(no name of one)"
        raise UsageError(
            f"cannot open '{url}': unknown option {shown}; {scheme}:// has {', '.join(sorted(known))}",
            hint=did_you_mean(name, known),
        )
    if name in _FLAGS and value.lower() not in _YES | _NO:
        raise UsageError(f"cannot open '{url}': {name} must be yes or no")
    if name == "endpoint" and {*"@?#"} & {*value}:
        raise UsageError(
            f"cannot open '{url}': the endpoint has more than a host, a port and a path, and URLs are "
            "written into logs",
            hint="credentials come from the environment",
        )
    if name in _PLAIN and not _PLAIN[name].fullmatch(value):
        raise UsageError(f"cannot open '{url}': {name} must be one word")


def connect(address: BucketAddress, limit_s: float | None, *, repeat: bool) -> Any:
    """Return obstore's store of a bucket; makes no request.

    With `repeat`, obstore repeats failing requests within `limit_s` (None: `RETRY_S`).  UsageError for a
    configuration that obstore refuses.
    """
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, S3Store

    kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    limit = RETRY_S if limit_s is None else limit_s
    config = {"s3": _s3, "gs": _gs, "az": _az}[address.scheme](address)
    provider = config.pop("credential_provider", None)
    endpoint = str(config.get("endpoint") or config.get("base_url") or "")
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=min(_REQUEST_S, max(limit / 3, 0.5))),
        "connect_timeout": timedelta(seconds=min(5.0, max(limit / 6, 0.5))),
    }
    if endpoint.startswith("http://") or address.flag("emulator"):
        client["allow_http"] = True
    retry: dict[str, Any] = {
        "max_retries": 1_000 if repeat else 0,
        "retry_timeout": timedelta(seconds=limit * 0.6),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=min(15.0, limit / 8)),
            "base": 2,
        },
    }
    try:
        return kinds[address.scheme](
            address.bucket,
            config=config,
            client_options=client,
            retry_config=retry,
            credential_provider=provider,
        )
    except (BaseError, ValueError, TypeError, OSError) as error:
        said = str(error).partition("\n")[0]
        raise UsageError(f"cannot open '{address.url}': {said}") from None


def _given(*variables: str) -> str | None:
    return next((os.environ[v] for v in variables if os.environ.get(v)), None)


def _s3(address: BucketAddress) -> dict[str, Any]:
    options = address.options
    config: dict[str, Any] = {}
    if address.flag("anonymous"):
        config["skip_signature"] = True
    else:
        config |= _of_profile(options.get("profile"), address.url)
    endpoint = options.get("endpoint") or _given("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    if endpoint:
        config["endpoint"] = endpoint
    region = options.get("region") or _given("AWS_REGION", "AWS_DEFAULT_REGION")
    config["region"] = region or config.get("region") or "us-east-1"
    if address.flag("virtual_host"):
        config["virtual_hosted_style_request"] = True
    return config


def _of_profile(name: str | None, url: str) -> dict[str, Any]:
    """obstore options from a profile of ~/.aws: that of the URL or AWS_PROFILE, else `default` if the
    environment has no keys.  Static keys are read here; boto3 resolves SSO and roles."""
    wanted = name or os.environ.get("AWS_PROFILE")
    if wanted is None and os.environ.get("AWS_ACCESS_KEY_ID"):
        return {}
    found = _profile(wanted or "default")
    if found is None:
        if wanted is None:
            return {}
        raise UsageError(
            f"cannot open '{url}': there is no profile {wanted!r} in ~/.aws/credentials or ~/.aws/config"
        )
    config = {k: found[k] for k in ("region",) if k in found}
    if "endpoint_url" in found:
        config["endpoint"] = found["endpoint_url"]
    if "aws_access_key_id" in found and "role_arn" not in found:
        config["access_key_id"] = found["aws_access_key_id"]
        config["secret_access_key"] = found.get("aws_secret_access_key", "")
        if "aws_session_token" in found:
            config["session_token"] = found["aws_session_token"]
    elif any(key.startswith(("sso_", "role_arn", "credential_")) for key in found):
        config["credential_provider"] = _boto3_provider(wanted or "default", url)
    return config


def _profile(name: str) -> dict[str, str] | None:
    found: dict[str, str] = {}
    home = Path("~/.aws").expanduser()
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(os.environ.get(variable) or home / file)
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        if parser.has_section(section):
            found |= dict(parser[section])
    return found or None


def _boto3_provider(profile: str, url: str) -> Any:
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise UsageError(
            f"cannot open '{url}': the profile {profile!r} has credentials from SSO, a role or a program, "
            "which boto3 asks",
            hint="pip install boto3",
        ) from None
    return Boto3CredentialProvider(boto3.session.Session(profile_name=profile))


def _gs(address: BucketAddress) -> dict[str, Any]:
    config: dict[str, Any] = {}
    endpoint = address.options.get("endpoint")
    if endpoint:
        config["base_url"] = endpoint
    if address.flag("anonymous"):
        config["skip_signature"] = True
        if endpoint:  # a server of tests: no token is asked for
            account = {"gcs_base_url": endpoint, "disable_oauth": True}
            account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
            config["service_account_key"] = json.dumps(account)
    return config


def _az(address: BucketAddress) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for ours, theirs in (("endpoint", "endpoint"), ("account", "account_name")):
        if ours in address.options:
            config[theirs] = address.options[ours]
    if address.flag("anonymous"):
        config["skip_signature"] = True
    if address.flag("emulator"):
        config["use_emulator"] = True
    return config
