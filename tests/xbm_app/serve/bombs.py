"""Files that are not what they seem: small ones that unpack to huge pictures, and text by the name of a photograph."""

import io
import random
import struct
import zlib
from pathlib import Path

from PIL import Image


def png_of_zeros(width: int, height: int, rows: int | None = None) -> bytes:
    """A black grey PNG, made row by row; with `rows`, one that ends early."""
    packer, packed = zlib.compressobj(9), []
    for start in range(0, height if rows is None else rows, 100):
        packed.append(packer.compress(bytes((width + 1) * min(100, height - start))))
    packed.append(packer.flush())
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", b"".join(packed)), (b"IEND", b"")]
    written = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def text_named_jpg(folder: Path) -> Path:
    path = folder / "letter.jpg"
    path.write_text("Dear Sir or Madam, this is not a photograph.\n" * 50)
    return path


# ------------------------------------------------------------------ generated ones


def jpeg_of_scans(side: int, scans: int) -> bytes:
    """A grey progressive JPEG that goes over all its blocks again in every scan, in which they end at once."""
    tables = struct.pack(">BBHB64s", 0xFF, 0xDB, 67, 0, bytes([16] * 64))
    frame = struct.pack(">BBHBHHBBBB", 0xFF, 0xC2, 11, 8, side, side, 1, 1, 0x11, 0)
    codes = struct.pack(">BBHB16sB", 0xFF, 0xC4, 20, 0x10, bytes([1] + [0] * 15), 0xE0)  # "0": this run of blocks ends
    runs = -(-(((side + 7) // 8) ** 2) // 32767)
    bits = ("0" + "1" * 14) * runs
    bits += "1" * (-len(bits) % 8)
    packed = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\x00")
    scan = struct.pack(">BBHBBBBBB", 0xFF, 0xDA, 8, 1, 1, 0x00, 1, 63, 0) + packed
    return b"\xff\xd8" + tables + frame + codes + scan * scans + b"\xff\xd9"


def webp_of_one_color(width: int, height: int) -> bytes:
    """A lossless WebP of 28 bytes: every code has a single symbol, so its pixels need no bits."""
    bits, position = 0, 0
    for value, length in [(0x2F, 8), (width - 1, 14), (height - 1, 14), (1, 1), (0, 3), (0, 3), *[(0b0001, 4)] * 5]:
        bits, position = bits | value << position, position + length
    data = bits.to_bytes(8, "little")
    return struct.pack("<4sI4s4sI", b"RIFF", 4 + 8 + len(data), b"WEBP", b"VP8L", len(data)) + data


def gif_of_zeros(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("P", (width, height)).save(file, "GIF")
    return file.getvalue()


def generated_bombs(count: int, seed: int = 0) -> list[tuple[str, bytes]]:
    """The three that were found first, and `count` others of all kinds and sizes: (name, content)."""
    draw = random.Random(seed)
    found = [
        ("JPEG of 1,000 scans", jpeg_of_scans(7000, 1000)),
        ("PNG of 49,000,000 × 1", png_of_zeros(49_000_000, 1)),
        ("WebP of 28 bytes", webp_of_one_color(16_383, 3_051)),
    ]
    for number in range(count):
        kind, pixels = number % 4, draw.randrange(20_000_000, 60_000_000)
        if kind == 0:
            side, scans = draw.randrange(2000, 8000), draw.randrange(100, 3000)
            found.append((f"JPEG of {side}², {scans} scans", jpeg_of_scans(side, scans)))
            continue
        width = draw.randrange(1, 16_384) if kind == 1 else draw.randrange(1, 65_536)
        height = min(16_384 if kind == 1 else 65_535, max(1, pixels // width))
        make = {1: webp_of_one_color, 2: gif_of_zeros, 3: png_of_zeros}[kind]
        found.append((f"{make.__name__} {width} × {height}", make(width, height)))
    return found
