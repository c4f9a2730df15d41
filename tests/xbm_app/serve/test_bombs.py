"""Uploads that are small and take long or take much, sent to a server process as fast as they can be."""

import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.xbm_app.serve.bombs import generated_bombs, png_of_zeros

MOST_MEMORY = 1_500_000_000


def memory(process):
    """Resident bytes of a process and of those that it has started; pages that they share count once."""
    try:
        held = re.search(r"Pss:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text())
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it has ended
        return 0
    return (1024 * int(held[1]) if held else 0) + sum(memory(int(child)) for child in children)


def post(port, content):
    """The status, and the seconds that it took."""
    body = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + content + b"\r\n--x--\r\n"
    request = Request(f"http://localhost:{port}/api/search", body, {"Content-Type": "multipart/form-data; boundary=x"})
    begun = time.monotonic()
    try:
        answer = urlopen(request, timeout=60)
    except HTTPError as refusal:
        answer = refusal
    with answer:
        told = json.loads(answer.read())
    assert answer.status == 200 or list(told) == ["error"]
    return answer.status, time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory can be limited on Linux only")
def test_bombs_are_answered_in_time_and_take_little_memory(searchers, own_photos):
    bombs = generated_bombs(24)
    process = subprocess.Popen(
        [sys.executable, "-m", "xbm", "serve", str(searchers[0].folder), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    peak, ended = [0], threading.Event()

    def watch():
        while not ended.wait(0.05):
            peak[0] = max(peak[0], memory(process.pid))

    try:
        port = int(re.search(r":(\d+)/", process.stdout.readline()).group(1))
        photo = (own_photos / "class_03" / "2.png").read_bytes()
        assert post(port, photo)[0] == 200
        threading.Thread(target=watch, daemon=True).start()
        alone = [(name, *post(port, content)) for name, content in bombs]
        long = png_of_zeros(49_000_000, 1)
        with ThreadPoolExecutor(40) as clients:
            together = list(clients.map(lambda _: post(port, long), range(40)))
        assert any(post(port, photo)[0] == 200 for _ in range(20))
    finally:
        ended.set()
        process.kill()
        process.wait()
    slowest = max(seconds for *_, seconds in alone), max(seconds for _, seconds in together)
    print("\n".join(f"{name}: {status}, {seconds:.2f} s" for name, status, seconds in alone))
    print(f"{len(bombs)} bombs: {slowest[0]:.2f} s at most; 40 at once: {slowest[1]:.2f} s; {peak[0] / 1e6:.0f} MB at most")
    assert {status for _, status, _ in alone} <= {200, 413, 422, 503}  # 503 if a killed worker is not yet replaced
    assert {status for status, _ in together} <= {413, 422, 503}
    assert peak[0] < MOST_MEMORY and max(slowest) < 5
