"""A run below a prefix of an S3 bucket: whole objects, created with `If-None-Match: *`."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
import inspect
import os
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from checkrun_format.errors import CheckrunError, InvalidInputError
from checkrun_format.stores.bodies import Body, Received
from checkrun_format.stores.failures import code_of, explained, may_pass, scrubbed
from checkrun_format.stores.interface import AlreadyExistsError, Buffer, Store
from checkrun_format.stores.retries import Patience, persist

if TYPE_CHECKING:
    import zarr.abc.store

_T = TypeVar("_T")

_PARALLEL = 32
_BUDGET_BYTES = 192 << 20
_PREFIX_BYTES = 800
"""S3 keys have at most 1024 bytes; the longest of a checkpoint is shorter than the rest."""
_SECRET_LETTERS = 4
_SLOWEST = 64 << 10
"""Bytes per second: a transfer that is slower than that, for all of the object, is given up."""
_SECONDS = 60.0
_PIECE = 256 << 10
_MISSING = {"NoSuchKey", "NotFound", "404"}
_TAKEN = {"PreconditionFailed", "412"}
_CONFIG = {
    "connect_timeout": 10,
    "read_timeout": _SECONDS,
    "max_pool_connections": _PARALLEL,
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "retries": {"total_max_attempts": 1},  # `persist` tries again, bodies included, and knows a deadline
}


class S3Store(Store):
    """Objects below a prefix of a bucket.

    s3fs finds the credentials and makes the client; the calls are those of the client itself. So no listing is ever
    cached, no object is looked for before it is read, and each call is one request.

    Parameters
    ----------
    url : str
        `s3://bucket/prefix`; spaces and any other characters as they are.
    storage_options : mapping
        Of `s3fs.S3FileSystem`: `key`, `secret`, `token`, `profile`, `anon`, `endpoint_url`,
        `client_kwargs={"region_name": ...}`, `config_kwargs={"s3": {"addressing_style": "path"}}`,
        `s3_additional_kwargs` for every object that is written.
    single_writer : bool
        The caller sees to it that nobody else writes the run; then `create` looks before it writes, and a server may
        ignore conditions.
    patience : Patience

    Attributes
    ----------
    requests : Counter
        How many requests were sent, by operation: `GetObject`, `PutObject`, `ListObjectsV2`, ...; those that were sent
        again count again.
    """

    parallel = _PARALLEL
    budget_bytes = _BUDGET_BYTES
    inline_bytes = 0

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        single_writer: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self._bucket, self._root = _parsed(url)
        self.url = f"s3://{self._bucket}/{self._root}".rstrip("/")
        self.single_writer = single_writer
        self.requests: Counter[str] = Counter()
        self._options = dict(storage_options or {})
        self._patience = patience or Patience()
        self._answered = False
        self._filesystems: dict[int, Any] = {}
        self._made(asynchronous=False)  # refuses options that s3fs does not know

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    # Operations -------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        return self.ahead(key)()

    def open(self, key: str) -> Received | None:
        pieces = self._call(key, lambda client: self._read(client, self._key(key)))
        return None if pieces is None else Received(pieces)

    def ahead(self, key: str) -> Callable[[], bytes | None]:
        begun = self._begun(key, lambda client: self._read(client, self._key(key)))

        def result() -> bytes | None:
            pieces = begun()
            return None if pieces is None else b"".join(pieces)

        return result

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        body = Body(buffers)
        self._call(key, lambda client: self._write(client, self._key(key), body))
        return len(body)

    def create(self, key: str, data: bytes) -> None:
        if self.single_writer:
            if self.get(key) is not None:
                raise AlreadyExistsError(key)
            self.put(key, [data])
        elif not self._call(key, lambda client: self._write(client, self._key(key), Body([data]), IfNoneMatch="*")):
            raise AlreadyExistsError(key)

    def replace(self, key: str, data: bytes) -> None:
        self.put(key, [data])

    def delete(self, key: str) -> None:
        self._call(key, lambda client: self._remove(client, self._key(key)))

    def folders(self) -> list[str] | None:
        names = {name.removesuffix("/") for name in self._names(self._key(""), delimiter="/")}
        return list(names - {""}) if names else None

    def list(self, prefix: str) -> dict[str, int]:
        return self._names(self._key(f"{prefix}/" if prefix else ""), delimiter="")

    def modified(self, key: str) -> float | None:
        return self._call(key, lambda client: self._looked_at(client, self._key(key)))

    def sync(self, prefix: str) -> None:
        """What S3 has acknowledged survives."""

    def prepare(self) -> None:
        """Create one probe twice (VER-4): a server that lets it happen ignores conditions."""
        if self.single_writer:
            return
        key = f".probe/{secrets.token_hex(16)}"
        try:
            with contextlib.suppress(AlreadyExistsError):  # our own, after a lost acknowledgement
                self.create(key, b"1")
            self.create(key, b"2")
        except AlreadyExistsError:
            return
        finally:
            with contextlib.suppress(CheckrunError):  # whoever may write need not have the right to delete
                self.delete(key)
        raise _unconditional(self.url)

    def zarr_store(self, prefix: str) -> zarr.abc.store.Store:
        from zarr.storage import FsspecStore

        path = f"{self._bucket}/{self._key(prefix)}"
        return FsspecStore(self._made(asynchronous=True), path=path, read_only=True)

    # Requests ---------------------------------------------------------------------------------------------------------

    async def _read(self, client: Any, key: str) -> builtins.list[bytes] | None:
        try:
            answer = await client.get_object(Bucket=self._bucket, Key=key, **self._payer())
        except Exception as error:
            if code_of(error)[0] in _MISSING:
                return None
            raise
        size = int(answer["ContentLength"])
        async with asyncio.timeout(_SECONDS + size / _SLOWEST), answer["Body"] as body:
            pieces = [piece async for piece in body.iter_chunks(_PIECE)]
        came = sum(map(len, pieces))
        if came != size:
            raise ConnectionResetError(f"{came} of {size} bytes came")
        return pieces

    async def _write(self, client: Any, key: str, body: Body, **condition: str) -> bool:
        """Whether the condition held."""
        options = {**self._options.get("s3_additional_kwargs", {}), **self._payer(), **condition}
        try:
            async with asyncio.timeout(_SECONDS + len(body) / _SLOWEST):
                await client.put_object(Bucket=self._bucket, Key=key, Body=body if len(body) else b"", **options)
        except Exception as error:
            code, status = code_of(error)
            if condition and (code in _TAKEN or status == 412):
                return False
            if condition and (code == "NotImplemented" or status == 501):
                raise _unconditional(self.url) from None
            raise
        return True

    async def _remove(self, client: Any, key: str) -> None:
        await client.delete_object(Bucket=self._bucket, Key=key, **self._payer())

    async def _looked_at(self, client: Any, key: str) -> float | None:
        try:
            found = await client.head_object(Bucket=self._bucket, Key=key, **self._payer())
        except Exception as error:
            if code_of(error)[0] in _MISSING:
                return None
            raise
        return float(found["LastModified"].timestamp())

    def _names(self, start: str, delimiter: str) -> dict[str, int]:
        """Size by key, relative to the run; what a delimiter cuts off has size 0. Markers of folders are no objects."""
        found: dict[str, int] = {}
        after: dict[str, str] = {}
        while True:
            page = self._call(start.removeprefix(self._key("")), functools.partial(self._page, start, delimiter, after))
            for item in page.get("Contents", ()):
                if not item["Key"].endswith("/"):
                    found[item["Key"][len(self._key("")) :]] = int(item["Size"])
            for item in page.get("CommonPrefixes", ()):
                found[item["Prefix"][len(self._key("")) :]] = 0
            if not page.get("IsTruncated"):
                return found
            after = {"ContinuationToken": page["NextContinuationToken"]}

    async def _page(self, start: str, delimiter: str, after: Mapping[str, str], client: Any) -> Any:
        cut = {"Delimiter": delimiter} if delimiter else {}
        return await client.list_objects_v2(Bucket=self._bucket, Prefix=start, **cut, **after, **self._payer())

    def _key(self, key: str) -> str:
        return f"{self._root}/{key}" if self._root else key

    def _payer(self) -> dict[str, str]:
        return {"RequestPayer": "requester"} if self._options.get("requester_pays") else {}

    # The client -------------------------------------------------------------------------------------------------------

    def _made(self, *, asynchronous: bool) -> Any:
        """A filesystem of its own: its client belongs to one event loop, and its caches are off."""
        try:
            import s3fs
            from aiobotocore.session import AioSession
        except ImportError as error:
            raise InvalidInputError('s3:// needs s3fs: pip install "checkrun-format[s3]"') from error
        options = dict(self._options)
        unknown = options.keys() - inspect.signature(s3fs.S3FileSystem.__init__).parameters.keys() - {"profile"}
        if unknown:
            raise InvalidInputError(f"storage_options of {self.url}: s3fs knows no {min(unknown)!r}")
        session = AioSession(profile=options.pop("profile", None))
        session.register_component("data_loader", _models())
        fixed = {"use_listings_cache": False, "max_concurrency": 1, "skip_instance_cache": True}
        config = {**_CONFIG, **options.get("config_kwargs", {})}
        options = {"session": session, **options, **fixed, "config_kwargs": config, "asynchronous": asynchronous}
        try:
            return s3fs.S3FileSystem(**options)
        except (KeyError, TypeError, ValueError) as error:
            reason = type(error).__name__  # its text may repeat a secret
            raise InvalidInputError(f"storage_options of {self.url}: s3fs refuses them ({reason})") from None

    def _filesystem(self) -> Any:
        """The filesystem of this process: that of a parent is useless after a fork."""
        process = os.getpid()
        if process not in self._filesystems:
            self._filesystems.setdefault(process, self._made(asynchronous=False))
        return self._filesystems[process]

    def _call(self, key: str, attempt: Callable[[Any], Awaitable[_T]]) -> _T:
        """The result of a request, tried again if it may pass."""
        return self._begun(key, attempt)()

    def _begun(self, key: str, attempt: Callable[[Any], Awaitable[_T]]) -> Callable[[], _T]:
        """A request that is under way, on the loop of fsspec's own thread; what is returned waits for its result."""
        filesystem = self._filesystem()

        async def once() -> _T:
            client = await filesystem.set_session()
            client.meta.events.register("before-send.s3", self._count, unique_id="checkrun")
            result = await attempt(client)
            self._answered = True
            return result

        def passes(error: Exception) -> bool:
            self._answered |= bool(code_of(error)[1])
            return not isinstance(error, CheckrunError) and may_pass(error)

        def most() -> float:
            return self._patience.seconds if self._answered else self._patience.at_first

        future = asyncio.run_coroutine_threadsafe(persist(once, passes, most), filesystem.loop)

        def result() -> _T:
            with self._our_errors(key):
                try:
                    return future.result()
                except BaseException:
                    future.cancel()  # if the caller is gone, as after Ctrl-C, so is the request
                    raise

        return result

    @contextlib.contextmanager
    def _our_errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except (CheckrunError, AlreadyExistsError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a client raises, it is a failure of the store
            if isinstance(error, TypeError | ValueError) and not self._answered:  # a client could not even be made
                said = scrubbed(f"{type(error).__name__}: {error}", self._secrets())
                raise InvalidInputError(f"storage_options of {self.url}: a client refuses them ({said})") from None
            place = f"{self.url}/{key}" if key else self.url
            raise explained(error, place, self._secrets()) from None

    def _count(self, event_name: str, **_: Any) -> None:
        self.requests[event_name.rpartition(".")[2]] += 1

    def _secrets(self) -> Iterator[str]:
        """What must not stand in any text; what is too short for a secret would only garble it."""
        names = ("key", "secret", "token", "username", "password")
        of_clients = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        given = [self._options, self._options.get("client_kwargs") or {}]
        texts = [str(options.get(name) or "") for name in (*names, *of_clients) for options in given]
        texts += [os.environ.get(name.upper(), "") for name in of_clients]
        return (text for text in texts if len(text) >= _SECRET_LETTERS)


@functools.cache
def _models() -> Any:
    """Botocore's descriptions of services, read once: that takes longer than some requests."""
    from botocore.loaders import create_loader

    return create_loader()


def _unconditional(url: str) -> InvalidInputError:
    return InvalidInputError(
        f"{url}: this server ignores `If-None-Match: *`, so that two writers could overwrite each other's checkpoints. "
        "Open the run with single_writer=True if no other process ever writes it"
    )


def _parsed(url: str) -> tuple[str, str]:
    """Bucket and prefix."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if "@" in bucket or ":" in bucket:
        raise InvalidInputError("an address of S3 is s3://bucket/prefix; credentials go into storage_options")
    prefix = prefix.strip("/")
    if not bucket or any(name in ("", ".", "..") for name in prefix.split("/")[: None if prefix else 0]):
        raise InvalidInputError(f"{url!r}: an address of S3 is s3://bucket/prefix, without empty names")
    if "\\" in prefix:
        raise InvalidInputError(f"{url!r}: a prefix with a backslash, which some servers take for a slash: write /")
    if len(prefix.encode()) > _PREFIX_BYTES:
        raise InvalidInputError(f"{url!r}: the prefix is longer than {_PREFIX_BYTES} bytes")
    return bucket, prefix
