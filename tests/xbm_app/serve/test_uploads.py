import asyncio
import io
import os
import re
import struct
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.xbm_app.serve.bombs import jpeg_of_scans, png_of_zeros, webp_of_one_color
from xbm_app.serve import uploads
from xbm_app.serve.uploads import FORMATS, Decoders, UploadError, View, view_of


def file(kind, size=(40, 30), **options):
    target = io.BytesIO()
    Image.effect_noise(size, 90).convert("RGB").save(target, kind, **options)
    return target.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_usual_kinds_are_opened(kind):
    assert view_of(file(kind), View(16, "square")).shape == (16, 16, 3)
    assert view_of(file(kind), View(16, "shorter")).shape == (16, 21, 3)


def test_a_photograph_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert view_of(file("JPEG", (800, 400), exif=exif), View(16, "shorter")).shape == (32, 16, 3)


def refused(content):
    with pytest.raises(UploadError) as caught:
        view_of(content, View(16, "square"))
    return caught.value.status, caught.value.reason


@pytest.mark.parametrize("content", [b"", b"Dear Sir", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\x00" * 999])
def test_what_is_no_image_is_refused_whatever_its_name(content):
    status, told = refused(content)
    assert status == 415 and "not an image" in told


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("side", "words"), [(10_000, "10,000 × 10,000 pixels"), (30_000, "far too many pixels")])
def test_a_bomb_is_refused_before_it_is_unpacked(side, words):
    content = png_of_zeros(side, side, rows=10)  # nothing to unpack: only the header can have told
    status, told = refused(content)
    assert status == 413 and words in told and "50 million" in told


def test_a_file_that_is_cut_short_is_damaged():
    assert refused(file("PNG", (300, 300))[:4000])[0] == 422
    assert refused(file("JPEG", (300, 300))[:3000])[0] == 422
    content = bytearray(file("BMP"))
    content[18:26] = struct.pack("<ii", 40, 4000)
    assert refused(bytes(content))[0] == 422


# ------------------------------------------------------------------ in worker processes


def decoded(decoders, content, *views):
    """The views of an upload, or the status with which it is refused."""
    try:
        return asyncio.run(decoders.views(io.BytesIO(content), views or [View(32, "square")]))
    except UploadError as error:
        return error.status


def process_of(decoders):
    return decoders._workers[0]._process


def test_a_worker_returns_what_decoding_here_would(decoders):
    views = [View(32, "square"), View(24, "shorter")]
    for kind in FORMATS:
        content = file(kind, (90, 70))
        for one, other in zip(decoded(decoders, content, *views), views, strict=True):
            assert np.array_equal(one, view_of(content, other))
    assert decoded(decoders, b"Dear Sir") == 415


def test_a_worker_that_takes_too_long_is_replaced(decoders, monkeypatch):
    assert len(decoded(decoders, file("PNG"))) == 1
    before = process_of(decoders).pid
    monkeypatch.setattr(uploads, "MOST_SECONDS", 0.3)
    assert decoded(decoders, jpeg_of_scans(7000, 1000)) == 422
    monkeypatch.undo()
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert len(decoded(decoders, file("PNG"))) == 1 and process_of(decoders).pid != before


@pytest.mark.skipif(sys.platform != "linux", reason="memory can be limited on Linux only")
def test_a_worker_takes_no_more_memory_than_it_may(decoders):
    assert decoded(decoders, png_of_zeros(49_000_000, 1)) == 413
    assert decoded(decoders, webp_of_one_color(16_383, 3_051)) in (413, 422)
    peak = re.search(r"VmPeak:\s+(\d+) kB", Path(f"/proc/{process_of(decoders).pid}/status").read_text())
    assert 1000 * int(peak[1]) < uploads.MOST_MEMORY + 300_000_000
    assert len(decoded(decoders, file("PNG"))) == 1  # by the same process


def test_a_worker_that_crashes_is_replaced(decoders):
    assert len(decoded(decoders, file("PNG"))) == 1
    threading.Timer(0.3, process_of(decoders).kill).start()
    assert decoded(decoders, jpeg_of_scans(7000, 1000)) == 422
    assert len(decoded(decoders, file("PNG"))) == 1


def test_an_upload_that_finds_every_worker_at_work_is_refused_as_busy(decoders, monkeypatch):
    async def two():
        with Decoders(1) as alone:
            await alone.views(io.BytesIO(file("PNG")), [View(8, "square")])
            monkeypatch.setattr(uploads, "MOST_WAITING", 0.2)
            slow = asyncio.create_task(alone.views(io.BytesIO(jpeg_of_scans(7000, 1000)), [View(8, "square")]))
            await asyncio.sleep(0)
            with pytest.raises(UploadError) as busy:
                await alone.views(io.BytesIO(file("PNG")), [View(8, "square")])
            with pytest.raises(UploadError) as ended:
                await slow
        return busy.value.status, ended.value.status

    monkeypatch.setattr(uploads, "MOST_SECONDS", 0.8)
    assert asyncio.run(two()) == (503, 422)


def test_closing_ends_a_worker_whatever_it_is_doing(decoders, monkeypatch):
    async def closed():
        own = Decoders(1)
        await own.views(io.BytesIO(file("PNG")), [View(8, "square")])
        slow = asyncio.create_task(own.views(io.BytesIO(jpeg_of_scans(7000, 1000)), [View(8, "square")]))
        await asyncio.sleep(0.3)
        process = process_of(own)
        own.close()
        with pytest.raises(UploadError) as ended:
            await slow
        return ended.value.status, process.is_alive(), process_of(own)

    monkeypatch.setattr(uploads, "MOST_SECONDS", 60)
    assert asyncio.run(closed()) == (503, False, None)
