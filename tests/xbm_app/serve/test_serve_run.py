import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from xbm.errors import InputError
from xbm_app.serve.run import access_to, address, is_loopback, listen


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.1.2.3", True), ("0.0.0.0", False), ("box", False)],
)
def test_only_loopback_needs_no_token(host, local):
    access = access_to(host, [], None)
    assert is_loopback(host) == local and (access.token is None) == local and access.addresses == (not local)
    assert access.knows("localhost:8000") and access.knows(f"{host}:8000" if ":" not in host else f"[{host}]:8000")


def test_a_token_of_ones_own_is_kept_and_made_up_ones_differ():
    assert access_to("0.0.0.0", [], "mine").token == "mine" and access_to("127.0.0.1", [], "mine").token == "mine"
    one, other = (access_to("0.0.0.0", [], None).token for _ in range(2))
    assert one != other and len(one) > 20


def test_further_names_can_be_allowed():
    assert access_to("127.0.0.1", ["Search.Example"], None).knows("search.example:80")
    assert not access_to("127.0.0.1", [], None).knows("search.example:80")


def test_the_address_can_be_opened():
    assert address("127.0.0.1", 80, None) == "http://127.0.0.1:80/" and address("::1", 80, "t") == "http://[::1]:80/?token=t"
    assert address("0.0.0.0", 80, None) == f"http://{socket.gethostname()}:80/"


def test_a_port_that_is_taken_is_one_sentence():
    with listen("127.0.0.1", 0) as taken, pytest.raises(InputError, match=r"cannot listen on 127\.0\.0\.1 port"):
        listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(InputError, match="cannot listen on"):
        listen("127.0.0.1", 99999)


@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_asked_to_end_it_still_answers_who_is_being_served(searchers, own_photos, end):
    command = [sys.executable, "-m", "xbm", "serve", str(searchers[0].folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline()).group(1))
        content = (own_photos / "class_03" / "2.png").read_bytes()
        body = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + content + b"\r\n--x--\r\n"
        head = f"POST /api/search HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:200])
            time.sleep(1.5)  # so that it is being served, on a busy machine too
            process.send_signal(end)
            time.sleep(0.5)
            caller.sendall(body[200:])
            caller.settimeout(60)
            answer = b"".join(iter(lambda: caller.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200") and b"class_03/2.png" in answer
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "stopped\n", "")
    finally:
        process.kill()
        process.wait()
