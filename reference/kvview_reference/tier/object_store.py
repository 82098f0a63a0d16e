"""``ObjectStore``: one object for each key, so that many machines share one tier.

    <url>/<namespace>/namespace.json   the namespace of the pages
                      <key>            a header with a seal, then the page

1. An object exists completely or not at all, as S3 and similar services guarantee (TIER-9).
2. An object that fails its seal is removed, and stored again by the next put (TIER-4). If the
   removal is not permitted, its key is a miss in this process until a put has replaced the object.
3. There is no byte budget, because a machine that shares a bucket cannot enforce one. A lifecycle
   rule of the bucket removes old objects, whose keys are then misses.
4. The objects of a namespace that belongs to one run are removed when the run ends. If the run was
   killed, a later run removes them once the run has stored nothing for ``run_expires`` seconds.
5. In a folder (``file://``, for trials) links are followed, unlike in ``FileStore``.
6. The client itself finds credentials (environment, profile, role of the machine); they are never
   an option. Of an error in a server's response, only the kind is logged or raised, never the text.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvview import ConfigError
from kvview.tier import Namespace
from kvview_reference.tier.deleting import DeletingStore
from kvview_reference.tier.entry import EntryFormat
from kvview_reference.tier.folder.store_folder import NOTE

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

_log = logging.getLogger(__name__)
_LOCAL = ("file", "memory")  # without a network: no timeouts, no options
_SECRET = re.compile(r"key|secret|token|password|credential|auth|sas|bearer", re.IGNORECASE)
_STATUS = re.compile(r"\bstatus(?: code)?:? (?:code )?([345]\d\d)\b")


class ObjectStore(DeletingStore):
    """A tier in a bucket, which verifies its pages with its own seals.

    Args:
        namespace: Namespace of the pages, which has its own prefix.
        url: ``s3://bucket/prefix`` or another URL that obstore accepts (``gs``, ``az``);
            ``file:///path`` and ``memory:///`` for trials. In a folder, a kill may leave the file
            of an interrupted write, which obstore never removes (TIER-9).
        threads: Maximum number of requests at once.
        timeout: Seconds after which a request fails.
        retries: Maximum number of retries of a failed request; no retry starts later than twice
            ``timeout``.
        checksum: ``"xxh3"``, ``"crc32"``, or ``"none"`` if the checksum of the guard is enough.
        run_expires: Seconds without a put after which a run counts as dead.
        options: Options of the client, such as ``region`` and ``endpoint``, but no credentials.

    Raises:
        ConfigError: An option cannot be used. A missing bucket is not an error: every key is a miss
            until the bucket exists.
    """

    verifies = True
    keys_of_a_lookup = 1  # because each key is a request

    def __init__(
        self,
        namespace: Namespace,
        *,
        url: str,
        threads: int = 16,
        timeout: float = 5.0,
        retries: int = 2,
        checksum: str = "xxh3",
        run_expires: float = 86_400.0,
        **options: Any,
    ) -> None:
        if not run_expires > 0:
            raise ConfigError(f"run_expires must be more than 0, got {run_expires}")
        self._format = EntryFormat(namespace, checksum)
        self._client = make_client(url, timeout, retries, options)
        self._prefix = namespace.digest.hex()
        self._run_expires = run_expires
        self._claim_again = -math.inf  # time from which the next put claims the prefix again
        self._logged_problems: set[str] = set()
        super().__init__(namespace, threads=threads)
        if namespace.run:
            self._later(self._remove_dead_runs)

    def holds(self, key: bytes, /) -> bool:
        """Whether the object of a key exists."""
        return self._size(key) is not None

    def load(self, key: bytes, page: memoryview, /) -> bool:
        """Read and verify the object of a key."""
        import obstore

        start, content = EntryFormat.head_bytes(key), memoryview(b"")
        with self._requesting("get"):
            found = obstore.get(self._client, self._path(key))
            if found.meta["size"] == start + len(page):
                content = memoryview(found.bytes())
        if len(content) != start + len(page):
            return False
        page[:] = content[start:]
        return content[:start] == self._format.head(key, page)

    def store(self, key: bytes, page: memoryview, *, is_replaced: bool) -> bool:
        """Store a page, unless another machine has stored it already."""
        import obstore

        self._claim()
        if is_replaced or self._size(key) != EntryFormat.head_bytes(key) + len(page):
            content: list[bytes | memoryview] = [self._format.head(key, page), page]
            with self._requesting("put"):
                obstore.put(self._client, self._path(key), content, use_multipart=False)
        return True

    def remove(self, key: bytes, /) -> None:
        """Delete the object of a key."""
        import obstore

        with suppress(FileNotFoundError), self._requesting("delete"):
            obstore.delete(self._client, self._path(key))

    def _size(self, key: bytes) -> int | None:
        import obstore

        with suppress(FileNotFoundError), self._requesting("head"):
            return obstore.head(self._client, self._path(key))["size"]
        return None

    def close(self) -> None:
        """End the jobs in flight, and remove the objects of a run."""
        super().close()
        if self.namespace.run:
            with suppress(OSError):
                self._remove_all(self._prefix)

    def _claim(self) -> None:
        """Store the namespace under its prefix, so that the operator of the bucket can read it.

        The namespace of a run is stored again regularly, which shows that the run is alive.
        """
        import obstore

        now = time.monotonic()
        if now < self._claim_again:
            return
        content, path = self.namespace.to_json().encode(), f"{self._prefix}/{NOTE}"
        with suppress(OSError), self._requesting("put"):
            obstore.put(self._client, path, content)
            self._claim_again = now + self._run_expires / 4 if self.namespace.run else math.inf

    def _remove_dead_runs(self) -> None:
        import obstore

        with suppress(OSError):
            with self._requesting("list"):
                prefixes = obstore.list_with_delimiter(self._client)["common_prefixes"]
            for prefix in map(str, prefixes):
                with suppress(ConfigError, FileNotFoundError):
                    if self._is_dead_run(prefix):
                        self._remove_all(prefix)

    def _is_dead_run(self, prefix: str) -> bool:
        import obstore

        with self._requesting("get"):
            note = obstore.get(self._client, f"{prefix}/{NOTE}")
            written, content = note.meta["last_modified"], bytes(note.bytes())
        namespace = Namespace.from_json(content.decode("utf-8", "replace"))
        age = (datetime.now(UTC) - written).total_seconds()
        return bool(namespace.run) and age > self._run_expires

    def _remove_all(self, prefix: str) -> None:
        import obstore

        note = f"{prefix}/{NOTE}"
        with self._requesting("delete"):
            for objects in obstore.list(self._client, prefix=prefix):
                paths = [found["path"] for found in objects]
                obstore.delete(self._client, [path for path in paths if path != note])
        with suppress(FileNotFoundError), self._requesting("delete"):
            obstore.delete(self._client, note)  # last, so that a removal can be repeated

    def _path(self, key: bytes) -> str:
        return f"{self._prefix}/{key.hex()}"

    @contextmanager
    def _requesting(self, what: str) -> Iterator[None]:
        """Make a request; raise any error as an ``OSError`` that only states the kind of error."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FileNotFoundError) and what != "put":
                raise FileNotFoundError("the object does not exist") from None
            problem = f"{what} fails: {_kind(error)}"
            if problem not in self._logged_problems:
                self._logged_problems.add(problem)
                _log.warning(
                    "%s: a request failed (%s), so its key is reported as a miss",
                    type(self).__name__,
                    problem,
                )
            raise OSError(problem) from None


def make_client(url: str, timeout: float, retries: int, options: Mapping[str, Any]) -> Client:
    """Make a client of obstore.

    Raises:
        ConfigError: obstore is not installed, or refuses these settings.
    """
    if not timeout > 0 or retries < 0:
        raise ConfigError(
            f"timeout must be more than 0 and retries at least 0, got {timeout} and {retries}"
        )
    if "max_bytes" in options:
        raise ConfigError(
            "max_bytes: no machine can enforce a budget on a bucket that machines share; give "
            "the bucket a lifecycle rule"
        )
    try:
        parts, seconds = urlsplit(url), timedelta(seconds=timeout)
        limits = {"max_retries": retries, "retry_timeout": 2 * seconds}
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"url or timeout cannot be used: {error}") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("url must only name the bucket; " + _CHAIN)
    for name in options:
        if _SECRET.search(name) or name in ("client_options", "retry_config"):
            raise ConfigError(f"option {name!r} is refused: {_CHAIN}")
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
            f"the object store at {parts.scheme}://{parts.netloc}{parts.path} cannot be opened "
            f"with the options {sorted(options)}: {_kind(error)}"
        ) from None


_CHAIN = (
    "credentials come from the client's own chain alone (AWS_ACCESS_KEY_ID and such in the "
    "environment, or the machine's role)"
)


def _kind(error: BaseException) -> str:
    """Return the class and the status of an error, but no text, which may contain credentials."""
    status = _STATUS.search(str(error))
    return type(error).__name__ + (f", status {status[1]}" if status else "")
