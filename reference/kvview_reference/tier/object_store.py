"""``ObjectStore``: an object a key, so that many machines share one tier.

    <url>/<namespace>/namespace.json   whose bytes these are
                      <key>            a header with a seal, then the page

1. An object is there whole or not at all: that is what S3 and its like promise (TIER-9).
2. What fails its seal is removed, and stored again by the next put (TIER-4). Where removing is
   not allowed it is a miss for this process until a put has replaced it.
3. There is no byte budget: none of the machines that share a bucket could keep one. A lifecycle
   rule of the bucket ends what is old; a key that went is a miss.
4. In a folder (``file://``, to try it) a link is not followed, and only a regular file is an
   object. A link that another program puts there while a request runs may be: that is for
   ``FileStore``.
5. Credentials are those of the client's own chain (environment, profile, role of the machine).
   None is taken as an option, and nothing that a server answers is logged or raised but its kind.
"""

from __future__ import annotations

import errno
import logging
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvview import ConfigError
from kvview.tier import Namespace
from kvview_reference.tier.deleting import DeletingStore
from kvview_reference.tier.entry import MOST_BYTES, EntryFormat
from kvview_reference.tier.store_folder import NOTE

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

_log = logging.getLogger(__name__)
_LOCAL = ("file", "memory")  # without a network: no timeouts, no options
_SECRET = re.compile(r"key|secret|token|password|credential|auth|sas|bearer", re.IGNORECASE)
_STATUS = re.compile(r"\bstatus(?: code)?:? (?:code )?([345]\d\d)\b")


class ObjectStore(DeletingStore):
    """A tier in a bucket (``verifies``: its own seals see what was damaged).

    Args:
        namespace: Whose bytes; a prefix of its own.
        url: ``s3://bucket/prefix`` or what else obstore reads (``gs``, ``az``); ``file:///path``
            and ``memory:///`` to try it.
        threads: Requests at once.
        timeout: Seconds of a request.
        retries: Of a request that failed on its way; none begins after twice ``timeout``.
        checksum: ``"xxh3"``, ``"crc32"``, or ``"none"`` where the guard's is enough.
        options: Of the client: ``region``, ``endpoint`` and such; no credentials.

    Raises:
        ConfigError: An option that cannot be used. A bucket that is not there is no error: it is
            a miss until it is there.
    """

    verifies = True
    keys_of_a_lookup = 1  # a request each

    def __init__(
        self,
        namespace: Namespace,
        *,
        url: str,
        threads: int = 16,
        timeout: float = 5.0,
        retries: int = 2,
        checksum: str = "xxh3",
        **options: Any,
    ) -> None:
        self._format = EntryFormat(namespace, checksum)
        self._client = make_client(url, timeout, retries, options)
        self._prefix = namespace.digest.hex()
        self._is_claimed = False
        self._said: set[str] = set()
        super().__init__(namespace, threads=threads)

    def holds(self, key: bytes, /) -> bool:
        """Whether there is an object."""
        return self._size(key) is not None

    def load(self, key: bytes, page: memoryview, /) -> bool:
        """Ask for the object and compare."""
        import obstore

        start, content = EntryFormat.head_bytes(key), memoryview(b"")
        with self._asking("get", self._path(key)):
            found = obstore.get(self._client, self._path(key))
            if found.meta["size"] == start + len(page):
                content = memoryview(found.bytes())
        if len(content) != start + len(page):
            return False
        page[:] = content[start:]
        return content[:start] == self._format.head(key, page)

    def store(self, key: bytes, page: memoryview, *, is_replaced: bool) -> bool:
        """Store, unless another machine has."""
        import obstore

        self._claim()
        if is_replaced or self._size(key) != EntryFormat.head_bytes(key) + len(page):
            content: list[bytes | memoryview] = [self._format.head(key, page), page]
            with self._asking("put", self._path(key)):
                obstore.put(self._client, self._path(key), content, use_multipart=False)
        return True

    def remove(self, key: bytes, /) -> None:
        """Delete the object."""
        import obstore

        with suppress(FileNotFoundError), self._asking("delete", self._path(key)):
            obstore.delete(self._client, self._path(key))

    def _size(self, key: bytes) -> int | None:
        import obstore

        with suppress(FileNotFoundError), self._asking("head", self._path(key)):
            return obstore.head(self._client, self._path(key))["size"]
        return None

    def _claim(self) -> None:
        """Say whose prefix it is, for ``kvview tier fsck``."""
        import obstore

        if self._is_claimed:
            return
        content, path = self.namespace.to_json().encode(), f"{self._prefix}/{NOTE}"
        with suppress(OSError), self._asking("put", path):
            obstore.put(self._client, path, content)
            self._is_claimed = True

    def _path(self, key: bytes) -> str:
        return f"{self._prefix}/{key.hex()}"

    @contextmanager
    def _asking(self, what: str, path: str) -> Iterator[None]:
        """Make a request; an error is raised as an ``OSError`` that names its kind alone."""
        try:
            _require_plain(self._client, path)
            yield
        except Exception as error:
            if isinstance(error, FileNotFoundError) and what != "put":
                raise FileNotFoundError("there is no such object") from None
            problem = f"{what} fails: {_kind(error)}"
            if problem not in self._said:
                self._said.add(problem)
                _log.warning("%s: %s; what fails is a miss", type(self).__name__, problem)
            raise OSError(problem) from None


def _require_plain(client: Client, path: str) -> None:
    """Refuse an object in a folder that is a link, a pipe or a device, or is behind a link.

    Raises:
        OSError: It is one: a client would follow the link, or wait for the pipe forever.
    """
    from obstore.store import LocalStore

    if not isinstance(client, LocalStore) or client.prefix is None:
        return
    place, (*folders, name) = client.prefix, path.split("/")
    with suppress(FileNotFoundError):
        for folder in folders:
            place /= folder
            if not stat.S_ISDIR(place.lstat().st_mode):
                raise OSError(errno.ENOTDIR, "it is not a folder", folder)
        if not stat.S_ISREG((place / name).lstat().st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", name)


def make_client(url: str, timeout: float, retries: int, options: Mapping[str, Any]) -> Client:
    """A client of obstore's.

    Raises:
        ConfigError: It is not installed, or cannot be made of these.
    """
    if not timeout > 0 or retries < 0:
        raise ConfigError(f"timeout must be over 0 and retries at least 0: {timeout}, {retries}")
    if "max_bytes" in options:
        raise ConfigError(
            "max_bytes: a bucket that machines share has no budget that one of them could keep; "
            "give the bucket a lifecycle rule"
        )
    try:
        parts, seconds = urlsplit(url), timedelta(seconds=timeout)
        limits = {"max_retries": retries, "retry_timeout": 2 * seconds}
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"url or timeout cannot be used: {error}") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("url: name the bucket alone; " + _CHAIN)
    for name in options:
        if _SECRET.search(name) or name in ("client_options", "retry_config"):
            raise ConfigError(f"option {name!r} is not taken: {_CHAIN}")
    try:
        from obstore.store import from_url
    except ImportError:
        raise ConfigError("an object store needs obstore: pip install 'kvview[objects]'") from None
    given: dict[str, Any] = {**options}
    if parts.scheme == "file":
        given["mkdir"] = True
    elif parts.scheme not in _LOCAL:
        is_plain = str(options.get("endpoint", "")).startswith("http://")
        given["client_options"] = {"timeout": seconds, "connect_timeout": seconds}
        given["client_options"] |= {"allow_http": True} if is_plain else {}
        given["retry_config"] = limits
    try:
        return from_url(url, **given)
    except Exception as error:
        raise ConfigError(
            f"no object store at {parts.scheme}://{parts.netloc}{parts.path} with the options "
            f"{sorted(options)}: {_kind(error)}"
        ) from None


_CHAIN = (
    "credentials come from the client's own chain alone (AWS_ACCESS_KEY_ID and such in the "
    "environment, or the machine's role)"
)


def list_folders(client: Client) -> list[str]:
    """Names of the folders at the top of an object store.

    Raises:
        ConfigError: It cannot be listed.
    """
    import obstore

    with _listing():
        return sorted(obstore.list_with_delimiter(client)["common_prefixes"])


def list_objects(client: Client, folder: str) -> Iterator[str]:
    """Paths of the objects in a folder and below.

    Raises:
        ConfigError: It cannot be listed.
    """
    import obstore

    chunks = iter(obstore.list(client, folder))
    while True:
        with _listing():
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield from (meta["path"] for meta in chunk)


def read_object(client: Client, path: str) -> bytes:
    """Content of an object.

    Raises:
        OSError: It is not there, or cannot be read.
    """
    import obstore

    try:
        _require_plain(client, path)
        found = obstore.get(client, path)
        if (size := found.meta["size"]) > MOST_BYTES:  # the client would end the process
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than any entry")
        return bytes(found.bytes())
    except obstore.exceptions.BaseError as error:
        raise OSError(errno.EIO, _kind(error)) from None


@contextmanager
def _listing() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigError(f"the object store cannot be listed: {_kind(error)}") from None


def _kind(error: BaseException) -> str:
    """Class and status of an error, without its text: servers put signatures and accounts there."""
    status = _STATUS.search(str(error))
    return type(error).__name__ + (f", status {status[1]}" if status else "")
