import asyncio
import json
import socket
from urllib.parse import urlsplit

import pytest

from xbm.errors import InputError
from xbm_app.serve import access as module
from xbm_app.serve.access import Access, Guard, access_to, address, is_loopback, listen
from xbm_app.serve.uploads import MOST_BYTES

LOCAL = Access(frozenset({"localhost", "127.0.0.1", "::1"}))
OPEN_TO_ALL = Access(frozenset({"localhost", "box"}), addresses=True, token="s3cret")


async def echo(scope, receive, send):
    read = 0
    while True:
        message = await receive()
        read += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"max-age=5")]})
    await send({"type": "http.response.body", "body": str(read).encode()})


def ask(access, path="/api/search", query=b"", pieces=(b"",), scheme="http", **headers):
    """(status, headers, body) of a request through the guard."""
    sent, left = [], list(pieces)

    async def receive():
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in {"host": "localhost:8000", **headers}.items()]
    scope = {"type": "http", "scheme": scheme, "path": path, "query_string": query, "headers": given}
    asyncio.run(Guard(echo, access)(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, sent[1]["body"], left


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST:8000"])
def test_its_own_names_pass(host):
    assert ask(LOCAL, host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1:8000", "", "[", "127.0.0.1@evil.example"])
def test_foreign_names_are_refused(host):
    status, _, body, _ = ask(LOCAL, host=host)
    assert status == 400 and "unknown host name" in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("host", "status"), [("box:80", 200), ("10.0.0.1:80", 200), ("[fe80::1]:80", 200), ("evil.example", 400)]
)
def test_outside_this_machine_addresses_pass_but_foreign_names_do_not(host, status):
    assert ask(OPEN_TO_ALL, host=host, authorization="Bearer s3cret")[0] == status


def test_the_pages_of_other_sites_are_refused():
    assert ask(LOCAL, origin="http://localhost:8000")[0] == 200
    assert ask(LOCAL, origin="http://localhost:9999")[0] == 403
    assert ask(LOCAL, origin="https://evil.example")[0] == 403
    assert ask(LOCAL, origin="null")[0] == 403


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "http://]", "//", "", "\t", "http://localhost:8000:8000"])
def test_a_malformed_origin_is_refused_like_a_foreign_one(origin):
    status, _, body, _ = ask(LOCAL, origin=origin)
    assert status == 403 and list(json.loads(body)) == ["error"]


def test_the_token_is_asked_for_everywhere_but_for_the_health():
    assert ask(OPEN_TO_ALL)[0] == 401 and ask(OPEN_TO_ALL, path="/")[0] == 401
    assert ask(OPEN_TO_ALL, path="/api/health")[0] == 200
    for given in ("Bearer wrong", "Bearer s3cre", "Bearer s3crett", "Basic s3cret", "Bearer", "Bearer schlüssel"):
        assert ask(OPEN_TO_ALL, authorization=given)[0] == 401
    assert ask(OPEN_TO_ALL, authorization="Bearer s3cret")[0] == 200
    for other in ("a=b", "a[0]=1"):  # cookies of other applications, well-formed or not
        assert ask(OPEN_TO_ALL, cookie=f"{other}; xbm_token=s3cret")[0] == 200
    assert ask(OPEN_TO_ALL, cookie="xbm_token=no")[0] == 401 and ask(OPEN_TO_ALL, cookie='"')[0] == 401
    assert ask(OPEN_TO_ALL, query=b"token=s3cret")[0] == 401  # not in the address of a call


def test_opening_the_printed_address_leaves_a_cookie_and_no_token_in_the_address():
    status, headers, _, _ = ask(OPEN_TO_ALL, path="/", query=b"token=s3cret")
    assert (status, headers["location"]) == (303, "/")
    assert headers["set-cookie"] == "xbm_token=s3cret; HttpOnly; SameSite=Strict; Path=/"
    assert ask(OPEN_TO_ALL, path="/", query=b"token=wrong")[0] == 401


ODD_TOKENS = ["a+b", "a&b=c", "a#b", "100%", "%41", "two words", "a;b,c", 'quote"d', "schlüssel", "鍵", "a/b?c\\d"]


@pytest.mark.parametrize("token", ODD_TOKENS)
def test_a_token_of_any_characters_works_in_the_address_the_cookie_and_the_header(token):
    access = access_to("0.0.0.0", [], token)
    printed = urlsplit(address("127.0.0.1", 8000, access.token))
    assert printed.path == "/" and not printed.fragment and printed.query.isascii()
    status, headers, _, _ = ask(access, host="127.0.0.1:8000", path="/", query=printed.query.encode())
    assert status == 303
    cookie = headers["set-cookie"].partition(";")[0]
    assert ask(access, cookie=f"other=1; {cookie}")[0] == 200 and ask(access, cookie=cookie[:-1])[0] == 401
    assert ask(access, authorization=f"Bearer {token}")[0] == 200  # in UTF-8, as curl sends it
    assert ask(access, authorization=f"Bearer {token}x")[0] == 401


def test_the_cookie_is_kept_from_plain_connections_once_it_was_set_over_tls():
    _, headers, _, _ = ask(OPEN_TO_ALL, path="/", query=b"token=s3cret", scheme="https")
    assert headers["set-cookie"].endswith("; Secure")


@pytest.mark.parametrize("token", ["a\nb", "a\x00", "\udcff", "\x7f"])
def test_a_token_that_no_header_can_carry_is_refused_at_the_start(token):
    with pytest.raises(InputError, match="token"):
        access_to("127.0.0.1", [], token)


@pytest.mark.parametrize("token", ["", "  "])
def test_an_empty_token_is_none(token):
    assert access_to("127.0.0.1", [], token).token is None and len(access_to("0.0.0.0", [], token).token) > 20


def test_a_token_protects_a_loopback_server_too():
    access = access_to("127.0.0.1", [], " mine ")
    assert ask(access)[0] == 401 and ask(access, authorization="Bearer mine")[0] == 200


def test_a_body_that_says_it_is_too_large_is_read_and_forgotten():
    status, _, body, left = ask(LOCAL, content_length=str(50_000_000), pieces=[b"x" * 1000] * 50)
    assert status == 413 and "20 MB" in json.loads(body)["error"] and left == []
    assert ask(LOCAL, content_length="many")[0] == 413


def test_a_body_that_keeps_silent_about_its_size_is_counted():
    piece = b"x" * 1_000_000
    assert ask(LOCAL, pieces=[piece] * (MOST_BYTES // len(piece)))[2] == str(MOST_BYTES).encode()
    with pytest.raises(module.HTTPException) as caught:  # which the application turns into an answer
        ask(LOCAL, pieces=[piece] * 50)
    assert caught.value.status_code == 413


def test_every_answer_carries_the_headers_and_keeps_its_own():
    _, headers, _, _ = ask(LOCAL)
    assert "default-src 'none'" in headers["content-security-policy"] and headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "max-age=5"
    refused = ask(LOCAL, host="evil.example")[1]
    assert refused["cache-control"] == "no-store" and "content-security-policy" in refused


def test_draining_ends_when_the_client_does_not(monkeypatch):
    monkeypatch.setattr(module, "DRAINED_BYTES", 10_000)
    status, _, _, left = ask(LOCAL, content_length="999999999", pieces=[b"x" * 1000] * 50)
    assert status == 413 and len(left) == 40
    monkeypatch.setattr(module, "DRAINED_SECONDS", 0.05)

    async def never():
        await asyncio.sleep(60)

    asyncio.run(module._drain(never))


def test_web_sockets_are_not_answered():
    async def nothing(*_):
        pytest.fail("asked")

    asyncio.run(Guard(nothing, LOCAL)({"type": "websocket"}, nothing, nothing))


# ------------------------------------------------------------------ where it listens


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
