"""A server that keeps pages by key in memory, for ``examples/remote_store.py``.

    python examples/page_server.py 9000

The server keeps the pages that were used most recently, because engines that were killed never
delete their pages.

A request consists of an operation (H: has, G: get, P: put), the lengths of key and page, the key,
and the page. A response consists of a length and as many bytes: a page, "+" for yes, or no bytes
for no.
"""

import asyncio
import sys


async def serve(port: int, most_pages: int = 100_000) -> asyncio.Server:
    """Start a server; port 0 stands for any free port."""
    pages: dict[bytes, bytes] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while operation := await reader.read(1):
                key_length = int.from_bytes(await reader.readexactly(2), "big")
                page_length = int.from_bytes(await reader.readexactly(4), "big")
                key = await reader.readexactly(key_length)
                page = await reader.readexactly(page_length)
                if operation == b"P":
                    pages[key] = page
                if found := pages.pop(key, b""):
                    pages[key] = found  # now the last one
                if len(pages) > most_pages:
                    del pages[next(iter(pages))]
                if operation != b"G":
                    found = found and b"+"
                writer.write(len(found).to_bytes(4, "big") + found)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", port)


async def main() -> None:
    """Serve until the process is stopped."""
    server = await serve(int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
