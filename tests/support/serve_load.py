"""``python -m tests.support.serve_load RUN``: what a server of this machine bears, beside a plain loop.

Fifty clients on loopback send one small photo after another to a server process. The loop calls the predictor with the
same photos, one at a time. It is a measurement and no test: other work on the machine changes it.
"""

import argparse
import asyncio
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from PIL import Image

import shortlist as sl
from tests.support.serving import photo

_BOUNDARY = "photo"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=300.0, help="give up after so long")
    given = parser.parse_args(arguments)
    photos = [photo(number, "JPEG", size=(64, 64)) for number in range(100)]
    print(f"predictor, one photo at a time: {plain_loop(given.run, photos):.0f} images a second")
    with server(given.run) as (address, process):
        asyncio.run(load(address, photos, given.clients, given.warm_up, given.seconds))
        before = resident_megabytes(process)
        began = time.perf_counter()
        latencies, errors = asyncio.run(load(address, photos, given.clients, given.requests, given.seconds))
        took = time.perf_counter() - began
        after = resident_megabytes(process)
    cuts = statistics.quantiles(latencies, n=100)
    print(f"server, {given.clients} clients: {len(latencies) / took:.0f} images a second, {errors} errors")
    print(f"latency, ms: p50 {1000 * cuts[49]:.0f}, p95 {1000 * cuts[94]:.0f}, p99 {1000 * cuts[98]:.0f}")
    print(f"memory of the server, MB: {before:.0f}, after {len(latencies):,} more requests {after:.0f}")


def plain_loop(run: Path, photos: Sequence[bytes], seconds: float = 5.0) -> float:
    """Images a second."""
    predictor = sl.load(run, "cpu")
    predictor.suggest(Image.open(io.BytesIO(photos[0])))
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        predictor.suggest(Image.open(io.BytesIO(photos[done % len(photos)])))
        done += 1
    return done / (time.perf_counter() - began)


@contextmanager
def server(run: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server process without a limit on the rate, and its address."""
    command = [sys.executable, "-m", "shortlist", "serve", str(run), "--port", "0", "--rate", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.terminate()


async def load(
    address: str, photos: Sequence[bytes], clients: int, requests: int, seconds: float
) -> tuple[list[float], int]:
    """Seconds of each request that was answered, and the number of those that were not."""
    url = urlsplit(address)
    bodies = [_request(url.netloc, content) for content in photos]
    latencies: list[float] = []
    numbers = iter(range(requests))
    errors = 0

    async def client() -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        for number in numbers:
            began = time.perf_counter()
            writer.write(bodies[number % len(bodies)])
            status, is_last = await _answer(reader)
            if status == 200:
                latencies.append(time.perf_counter() - began)
            else:
                errors += 1
            if is_last:
                writer.close()
                reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.close()

    async with asyncio.timeout(seconds):
        await asyncio.gather(*(client() for _ in range(clients)))
    return latencies, errors


def _request(host: str, content: bytes) -> bytes:
    # Written by hand: a client library would take more of the two cores than the server does.
    part = f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="photos"; filename="a"\r\n\r\n'.encode()
    body = part + content + f"\r\n--{_BOUNDARY}--\r\n".encode()
    head = f"POST /api/suggest HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n"
    return f"{head}content-type: multipart/form-data; boundary={_BOUNDARY}\r\n\r\n".encode() + body


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status, and whether the server closes the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    await reader.readexactly(length)
    return int(head.split()[1]), "connection: close" in head


def resident_megabytes(process: "subprocess.Popen[str]") -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main()
