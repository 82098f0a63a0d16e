r"""A complete connector that keeps pages on a server that several engines share, with asyncio.

    python examples/page_server.py 9000 &
    kvview check examples/remote_store.py:RemoteConnector --option port=9000 \
        --option 'weights={tmp}'

Engines with equal ``weights`` share pages, and engines without ``weights`` share no pages. The
check passes a different text to each of its engines.
"""

import asyncio

from kvview.tier import AsyncStore, Namespace
from kvview_reference.store_connector import StoreConnector

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RemoteStore(AsyncStore):
    """Sends each page to a server, with one connection for each request in flight."""

    def __init__(self, namespace: Namespace, port: int, host: str = "127.0.0.1") -> None:
        self.address = host, port
        self.prefix = namespace.digest
        self.free: list[Connection] = []
        super().__init__(namespace)

    async def find(self, key: bytes, /) -> bool:
        return await self.ask(b"H", key) == b"+"

    async def fetch(self, key: bytes, page: memoryview, /) -> bool:
        found = await self.ask(b"G", key)
        if len(found) == len(page):
            page[:] = found
        return len(found) == len(page)

    async def send(self, key: bytes, page: memoryview, /) -> bool:
        return await self.ask(b"P", key, page) == b"+"

    async def ask(self, operation: bytes, key: bytes, page: memoryview | bytes = b"") -> bytes:
        if not self.free:
            self.free.append(await asyncio.open_connection(*self.address))
        reader, writer = self.free.pop()
        name = self.prefix + key
        lengths = len(name).to_bytes(2, "big") + len(page).to_bytes(4, "big")
        try:
            writer.write(b"".join((operation, lengths, name, page)))
            answer = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        except BaseException:  # such as a cancellation in the middle of an answer
            writer.close()
            raise
        self.free.append((reader, writer))
        return answer

    async def disconnect(self) -> None:
        for _, writer in self.free:
            writer.close()
        ends = (writer.wait_closed() for _, writer in self.free)
        await asyncio.gather(*ends, return_exceptions=True)  # the server may be gone


class RemoteConnector(StoreConnector):
    """The options are ``port``, ``host`` and ``weights``."""

    store = RemoteStore
