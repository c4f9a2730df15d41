"""The server under load: 50 clients for 30 seconds against 20,000 glyphs, which are generated and indexed first.

    python -m benchmarks.serve

Each client repeatedly requests a search by upload, a search for images similar to a random one, and a thumbnail. Server and
clients share the cores of one machine.
"""

import asyncio
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.measure import machine, process_memory

CLIENTS, SECONDS, IMAGES, ITERATIONS = 50, 30, 20_000, 200


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


async def client(
    port: int, pictures: list[Path], until: float, seed: int, times: dict[str, list[float]], errors: list[str]
) -> None:
    draw = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        body = draw.choice(pictures).read_bytes()
        form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + body + b"\r\n--x--\r\n"
        image = draw.randrange(1, IMAGES + 1)
        upload = (
            f"POST /api/search HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(form)}\r\n"
        )
        for kind, head, sent in (
            ("upload", upload, form),
            ("more like this", f"GET /api/search?like={image} HTTP/1.1\r\n", b""),
            ("thumbnail", f"GET /api/thumbnails/0/{image} HTTP/1.1\r\n", b""),
        ):
            begun = time.perf_counter()
            writer.write(f"{head}Host: localhost:{port}\r\n\r\n".encode() + sent)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", answer)
            await reader.readexactly(int(length.group(1)) if length else 0)
            times[kind].append(time.perf_counter() - begun)
            if not answer.startswith("HTTP/1.1 200"):
                errors.append(answer.splitlines()[0])
    writer.close()


async def load(port: int, server: int, pictures: list[Path]) -> None:
    times: dict[str, list[float]] = defaultdict(list)
    errors: list[str] = []
    begun, held = time.perf_counter(), []
    clients = [asyncio.create_task(client(port, pictures, begun + SECONDS, k, times, errors)) for k in range(CLIENTS)]
    for second in (5, 10, 20, SECONDS - 1):
        await asyncio.sleep(begun + second - time.perf_counter())
        held.append(f"{process_memory('VmRSS', server) / 1000:.0f} MB after {second} s")
    await asyncio.gather(*clients)
    spent = time.perf_counter() - begun
    total = sum(len(each) for each in times.values())
    print(f"{CLIENTS} clients, {spent:.1f} s: {total:,} requests, {len(errors)} errors, {total / spent:,.0f} per second")
    for kind, each in times.items():
        ranked = statistics.quantiles(each, n=100)
        print(f"  {kind}: {len(each):,}, median {1000 * ranked[49]:.0f} ms, p99 {1000 * ranked[98]:.0f} ms")
    print(f"memory of the server: {', '.join(held)}")
    if errors:
        print(errors[:5])


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
            asyncio.run(load(port, server.pid, pictures))
        finally:
            server.send_signal(signal.SIGTERM)
            print(f"server ended with {server.wait(30)}")


if __name__ == "__main__":
    main()
