"""Files that are not what they seem: small ones that unpack to huge pictures, and text by the name of a photograph."""

import struct
import zlib
from pathlib import Path


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
