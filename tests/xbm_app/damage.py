"""Seeded damage: flipped bits and zeroed pages anywhere in a file, and files that are truncated, foreign or hostile."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

PAGE = 4096


def flipped(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def zeroed(content: bytes, draw: random.Random) -> bytes:
    """One page of zeros, as a disk returns that lost it; never without effect."""
    pages = [start for start in range(0, len(content), PAGE) if any(content[start : start + PAGE])]
    start = draw.choice(pages)
    lost = len(content[start : start + PAGE])
    return content[:start] + bytes(lost) + content[start + lost :]


def damaged(content: bytes, flips: int, pages: int, seed: int = 0) -> Iterator[bytes]:
    """`flips` copies with one flipped bit each, then `pages` copies with a page of zeros."""
    draw = random.Random(seed)
    for damage, count in ((flipped, flips), (zeroed, pages)):
        for _ in range(count):
            yield damage(content, draw)


def hostile_values(value: object) -> Iterator[object]:
    """The value of a JSON file with one part of it missing, or replaced by something else."""
    if isinstance(value, dict):
        for key in value:
            yield {name: each for name, each in value.items() if name != key}
            for other in (None, -1, "<b>\x1b[2J", [], {}, 1e300, [[]]):
                yield {**value, key: other}
    yield from ([], None, 7, "text", {})


def hostile_contents(content: bytes, draw: random.Random) -> Iterator[bytes]:
    """Contents that no program of ours has written under this name."""
    yield b""
    yield content[: len(content) // 2]
    yield content[:-1]
    yield bytes(len(content))
    yield draw.randbytes(300)
    yield content + content
    yield b"\xff\xfe" + content
    yield b"\x89PNG\r\n\x1a\n" + draw.randbytes(100)
    yield b"[" * 100_000
    try:
        value = json.loads(content)
    except ValueError:
        return
    for each in hostile_values(value):
        yield json.dumps(each).encode()


def in_place_of(path: Path, contents: Iterator[bytes], call: Callable[[], object]) -> Iterator[object]:
    """What `call` gives with each of the contents in place of the file's, which is restored."""
    whole = path.read_bytes()
    try:
        for content in contents:
            path.write_bytes(content)
            yield call()
    finally:
        path.write_bytes(whole)


def without(folder: Path, name: str) -> None:
    """Removes a file if it is there, such as the list of checksums, as if an older version had written the folder."""
    if (folder / name).exists():
        os.remove(folder / name)
