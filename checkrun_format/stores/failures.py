"""What a failure of an S3 server means: whether it may pass, and which of our errors it is."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable

from checkrun_format.errors import AccessDeniedError, BucketNotFoundError, CredentialsError, StorageError

_PASSING_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_PASSING = {
    "BandwidthLimitExceeded",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "PriorRequestNotComplete",
    "ProvisionedThroughputExceededException",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestThrottledException",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "TooManyRequestsException",
}
_CREDENTIALS = {
    "ExpiredToken": "the credentials have expired: renew them",
    "ExpiredTokenException": "the credentials have expired: renew them",
    "TokenRefreshRequired": "the credentials have expired: renew them",
    "RequestExpired": "the request has expired: compare the clock of this machine with the server's",
    "RequestTimeTooSkewed": "the clock of this machine is not the server's: set it",
    "InvalidAccessKeyId": "the server does not know this access key",
    "InvalidClientTokenId": "the server does not know this access key",
    "InvalidSecurity": "the credentials are not valid",
    "InvalidToken": "the session token is not valid",
    "SignatureDoesNotMatch": "the signature does not match: the secret key is wrong, or the clock of this machine",
    "UnrecognizedClientException": "the server does not know this access key",
}
_BUSY = {"ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
_NO_CREDENTIALS = "no credentials: set them in the environment or in storage_options"
_OTHER_REGION = "the bucket is in another region: say which, in storage_options"
_FULL = {"InsufficientCapacity", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
_ELSEWHERE = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}


def code_of(error: BaseException) -> tuple[str, int]:
    """Code and HTTP status of what a server answered, "" and 0 if it did not answer."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return "", 0
    return (
        str(response.get("Error", {}).get("Code", "")),
        int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)),
    )


def may_pass(error: Exception) -> bool:
    """Whether the same call may succeed a little later."""
    import aiohttp
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    code, status = code_of(error)
    if code or status:
        return code in _PASSING or (status in _PASSING_STATUS and code not in _FULL)
    if isinstance(error, exceptions.SSLError):
        return False
    passing = (
        exceptions.ConnectionError,
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
        exceptions.ResponseStreamingError,
        aiohttp.ClientError,
        ResponseParserError,
        asyncio.TimeoutError,
        OSError,
    )
    return isinstance(error, passing)


def explained(error: Exception, place: str, secrets: Iterable[str]) -> StorageError:
    """Our error of a failure.

    Parameters
    ----------
    place : str
        What was to be reached.
    secrets : texts
        Whatever a server or a library says, these are not repeated.
    """
    kind, number, meaning = _meaning(error)
    said = scrubbed(_said(error), secrets)
    return kind(number, f"{place}: {meaning} ({said})" if said not in meaning else f"{place}: {meaning}")


def _meaning(error: Exception) -> tuple[type[StorageError], int, str]:
    from botocore import exceptions

    code, status = code_of(error)
    unreachable = (exceptions.ConnectionError, exceptions.HTTPClientError, ConnectionError)
    rights = "access denied (S3 says so, too, of what does not exist, to those who may not list the bucket)"
    busy = "the server has refused work for too long, because it has too much of it"
    known: list[tuple[bool, type[StorageError], int, str]] = [
        (code in _CREDENTIALS, CredentialsError, errno.EACCES, _CREDENTIALS.get(code, "")),
        (isinstance(error, _without_credentials()), CredentialsError, errno.EACCES, _NO_CREDENTIALS),
        (code == "NoSuchBucket", BucketNotFoundError, errno.ENOENT, "there is no such bucket"),
        (code in _ELSEWHERE or status in {301, 307}, StorageError, errno.EREMOTE, _OTHER_REGION),
        (status in {401, 403}, AccessDeniedError, errno.EACCES, rights),
        (code in _FULL or status == 507, StorageError, errno.ENOSPC, "the server is full: free some space, save again"),
        (isinstance(error, exceptions.ParamValidationError), StorageError, errno.EINVAL, "S3 allows no such name"),
        (
            isinstance(error, unreachable),
            StorageError,
            errno.EHOSTUNREACH,
            "the server cannot be reached, or went away",
        ),
        (isinstance(error, TimeoutError), StorageError, errno.ETIMEDOUT, "the server is too slow"),
        (code in _BUSY or status in {429, 503}, StorageError, errno.EBUSY, busy),
    ]
    return next((found[1:] for found in known if found[0]), (StorageError, errno.EIO, "the server failed"))


def _without_credentials() -> tuple[type[Exception], ...]:
    from botocore import exceptions

    return (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
        exceptions.TokenRetrievalError,
        exceptions.UnauthorizedSSOTokenError,
        exceptions.SSOTokenLoadError,
        exceptions.ProfileNotFound,
    )


def _said(error: Exception) -> str:
    code, status = code_of(error)
    if not code and not status:
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message = getattr(error, "response", {}).get("Error", {}).get("Message", "")
    return ", ".join(filter(None, [code, f"HTTP {status}" if status else "", str(message).strip()]))


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """A text without some secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text
