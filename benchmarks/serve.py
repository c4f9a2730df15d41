"""The server under load: 50 clients for 60 seconds or more against 20,000 glyphs, while the index is rewritten twice.

    python -m benchmarks.serve

Each client repeatedly requests a search by upload, a search for images similar to a result, and the thumbnail of a result.
Meanwhile all images are changed and indexed again, twice. Server, clients and `xbm index` share the cores of one machine.
"""

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch

from benchmarks.measure import machine, process_memory

CLIENTS, SECONDS, IMAGES, ITERATIONS, REWRITES = 50, 60, 20_000, 200, 2


def make_index(folder: Path) -> tuple[Path, list[Path]]:
    """Builds an index of 20,000 glyphs (of several seeds) with a briefly trained model; returns it and its images."""
    from xbm_app.data.glyphs import read_glyphs
    from xbm_app.data.images import write_pictures
    from xbm_app.search.update import update
    from xbm_app.train.config import override
    from xbm_app.train.loop import train
    from xbm_app.train.presets import preset

    changes = {"device": "cpu", "optim.iterations": ITERATIONS, "memory.start": 100, "log.checkpoint_every": ITERATIONS}
    train(override(preset("glyphs"), changes), folder / "run", quiet=True)
    for seed in range(3):
        data = read_glyphs(seed=seed, cache=folder / "cache")
        for part in (data.train, data.protocols[0].query):
            write_pictures(part, folder / "glyphs" / f"seed{seed}")
    pictures = sorted((folder / "glyphs").rglob("*.png"))
    for extra in pictures[IMAGES:]:
        extra.unlink()
    begun = time.perf_counter()
    update(folder / "run", folder / "glyphs", folder / "index", print, quiet=True)
    spent = time.perf_counter() - begun
    print(f"indexed {IMAGES:,} glyphs in {spent:.1f} s ({IMAGES / spent:,.0f} per second)")
    return folder / "index", pictures[:IMAGES]


async def rewrite(folder: Path, pictures: list[Path]) -> None:
    """Has every row of the index replaced, as many times as wanted, while the clients go on."""
    for number in range(REWRITES):
        await asyncio.sleep(2)
        for picture in pictures:
            os.utime(picture, ns=(number, number))
        begun = time.perf_counter()
        words = [sys.executable, "-m", "xbm", "index", folder / "run", folder / "glyphs", "--out", folder / "index"]
        process = await asyncio.create_subprocess_exec(*map(str, words), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        said, _ = await process.communicate()
        assert process.returncode == 0 and said.startswith(f"{IMAGES:,} embedded".encode()), said
        print(f"rewritten in {time.perf_counter() - begun:.1f} s, under load")
        await asyncio.sleep(3)  # so that the new content is asked for


class Client:
    """One client with one connection, which asks for what the page asks for."""

    def __init__(self, port: int, times: dict[str, list[float]], outcomes: Counter[str]) -> None:
        self.port, self.times, self.outcomes = port, times, outcomes

    async def go_on(self, pictures: list[Path], until: float, others: asyncio.Task[None], seed: int) -> None:
        draw = random.Random(seed)
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        while time.perf_counter() < until or not others.done():
            body = draw.choice(pictures).read_bytes()
            form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + body + b"\r\n--x--\r\n"
            kind = f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(form)}\r\n"
            image = await self.ask("upload", f"POST /api/search HTTP/1.1\r\n{kind}", form)
            if image is not None:
                await self.ask("more like this", f"GET /api/search?like={image} HTTP/1.1\r\n")
                await self.ask("thumbnail", f"GET /api/thumbnails/0/{image} HTTP/1.1\r\n")
        self.writer.close()

    async def ask(self, kind: str, head: str, body: bytes = b"") -> int | None:
        """The id of the first result."""
        begun = time.perf_counter()
        self.writer.write(f"{head}Host: localhost:{self.port}\r\n\r\n".encode() + body)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", answer)
        content = await self.reader.readexactly(int(length[1]) if length else 0)
        self.times[kind].append(time.perf_counter() - begun)
        status = int(answer.split()[1])
        results = json.loads(content)["runs"][0]["results"] if status == 200 and kind != "thumbnail" else [{"id": None}]
        gone = status == 404 and kind != "upload"  # a result of the index before it was rewritten
        self.outcomes["gone" if gone else f"status {status}" if status != 200 else "answered" if results else "empty"] += 1
        return results[0]["id"] if results else None


async def load(port: int, server: int, folder: Path, pictures: list[Path]) -> None:
    times: dict[str, list[float]] = defaultdict(list)
    outcomes: Counter[str] = Counter()
    begun, held = time.perf_counter(), []
    until = begun + SECONDS
    rewriting = asyncio.create_task(rewrite(folder, pictures))
    clients = [
        asyncio.create_task(Client(port, times, outcomes).go_on(pictures, until, rewriting, seed)) for seed in range(CLIENTS)
    ]
    while not all(client.done() for client in clients):
        await asyncio.wait(clients, timeout=10)
        held.append(sum(memory_of(server)) / 1e6)
    await asyncio.gather(rewriting, *clients)
    spent = time.perf_counter() - begun
    total = outcomes.total()
    print(f"{CLIENTS} clients, {spent:.1f} s: {total:,} requests, {total / spent:,.0f} per second; {dict(outcomes)}")
    for kind, each in times.items():
        ranked = statistics.quantiles(each, n=100)
        print(f"  {kind}: {len(each):,}, median {1000 * ranked[49]:.0f} ms, p99 {1000 * ranked[98]:.0f} ms")
    print(f"memory of the server and its workers, every 10 s: {min(held):.0f} to {max(held):.0f} MB")


def memory_of(process: int) -> list[int]:
    """Bytes of memory of a process and of those that it has started."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [1024 * process_memory("VmRSS", process)] + [held for child in children for held in memory_of(int(child))]


def main() -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        index, pictures = make_index(Path(folder))
        command = [sys.executable, "-m", "xbm", "serve", str(index), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = int(re.search(r":(\d+)/", server.stdout.readline()).group(1))
            asyncio.run(load(port, server.pid, Path(folder), pictures))
        finally:
            server.send_signal(signal.SIGTERM)
            print(f"server ended with {server.wait(30)}")


if __name__ == "__main__":
    main()
