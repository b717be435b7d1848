"""Fake router: sends each request to the least used worker that is ready, and closes its connection afterwards."""

import argparse
import asyncio
import urllib.request
from collections import Counter
from urllib.parse import urlsplit


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def serve(port: int, urls: list[str]) -> None:
    used = Counter[str]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = (url for url in sorted(urls, key=used.__getitem__) if is_ready(url))
        if (url := next(ready, None)) is None:
            writer.close()
            return
        used[url] += 1
        head = await reader.readuntil(b"\r\n\r\n")
        upstream = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        upstream[1].write(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        await asyncio.gather(copy(reader, upstream[1]), copy(upstream[0], writer))

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker-urls", nargs="+")
    parser.add_argument("--policy")
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.worker_urls))
