"""A stranger's address leads to public places only, and what comes from there is bounded."""

from __future__ import annotations

import asyncio
import gzip
import os
import threading
import zlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from omni_bus.errors import BadInput, MediaTooLarge, OmniBusError, Unreachable
from omni_bus.media.fetch import Fetcher, FetchOptions
from omni_bus.media.spool import Spool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Script = Callable[[str, asyncio.StreamWriter], Awaitable[None]]

LOOPBACK = ("127.0.0.1/32",)
MAX_BYTES = 100_000


class Site:
    """A server that plays a script for each request; knows what was asked of it."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[str] = []
        self.heads: list[str] = []


@asynccontextmanager
async def site(script: Script, host: str = "127.0.0.1") -> AsyncIterator[Site]:
    found = Site()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            found.heads.append(head)
            found.asked.append(head.split()[1])
            await script(head.split()[1], writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, host, 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer(body: bytes = b"hello", status: str = "200 OK", **headers: str) -> Script:
    async def script(path: str, writer: asyncio.StreamWriter) -> None:
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body)

    return script


def redirect(to: str, status: int = 302) -> Script:
    return answer(b"", f"{status} Moved", Location=to)


async def fetch(url: str, *, timeout_s: float = 20.0, lookup: Any = None, max_bytes: int = MAX_BYTES, **options: Any):
    """Return what is there."""
    settings = FetchOptions(**({"enabled": True, "allowed_networks": LOOPBACK} | options))
    fetcher = Fetcher(settings, **({"lookup": lookup} if lookup else {}))
    try:
        with Spool(max_bytes, what="image_url.url", memory_bytes=1000) as spool:
            await fetcher.fetch(url, spool, field="image_url.url", timeout_s=timeout_s)
            return os.pread(spool.fileno(), spool.num_bytes, 0)
    finally:
        await fetcher.close()


def names(**table: list[str]) -> Callable[[str, int], list[str]]:
    """A name server with these names."""

    def look_up(host: str, port: int) -> list[str]:
        if host not in table:
            raise OSError(-2, "Name or service not known")
        return table[host]

    return look_up


# --- what is fetched ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, 999, 1001, MAX_BYTES])
async def test_what_is_there_is_fetched(size: int) -> None:
    body = bytes(i % 251 for i in range(size))
    async with site(answer(body)) as server:
        assert await fetch(f"http://127.0.0.1:{server.port}/a/b?c=d") == body
        assert server.asked == ["/a/b?c=d"]


@pytest.mark.parametrize(
    ("encoding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)]
)
async def test_encoded_answer_is_decoded(encoding: str, encode: Any) -> None:
    async with site(answer(encode(b"hello" * 1000), Content_Encoding=encoding)) as server:
        assert await fetch(f"http://127.0.0.1:{server.port}/") == b"hello" * 1000
        assert "Accept-Encoding: identity" in server.heads[0]


async def test_name_is_resolved_and_sent_as_host() -> None:
    async with site(answer()) as server:
        url = f"http://media.example:{server.port}/x"
        assert await fetch(url, lookup=names(**{"media.example": ["127.0.0.1"]})) == b"hello"
        assert f"Host: media.example:{server.port}" in server.heads[0]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(status: int) -> None:
    async def script(path: str, writer: asyncio.StreamWriter) -> None:
        step = redirect("/b?x=1", status) if path == "/a" else answer(b"there")
        await step(path, writer)

    async with site(script) as server:
        assert await fetch(f"http://127.0.0.1:{server.port}/a") == b"there"
        assert server.asked == ["/a", "/b?x=1"]


async def test_nothing_of_a_caller_or_of_the_machine_is_sent_along(monkeypatch, tmp_path) -> None:
    async with site(answer()) as server, site(answer(b"through the proxy")) as proxy:
        (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login user password {'x' * 8}\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{proxy.port}")

        assert await fetch(f"http://127.0.0.1:{server.port}/") == b"hello"
        assert proxy.asked == []
        for header in ("Authorization", "Cookie", "Referer"):
            assert header not in server.heads[0]


async def test_cookies_do_not_live_on() -> None:
    async with site(answer(Set_Cookie="a=b")) as server:
        fetcher = Fetcher(FetchOptions(enabled=True, allowed_networks=LOOPBACK))
        for _ in range(2):
            with Spool(MAX_BYTES, what="f") as spool:
                await fetcher.fetch(f"http://127.0.0.1:{server.port}/", spool, field="f", timeout_s=20)
        await fetcher.close()
        assert "Cookie" not in server.heads[1]


# --- where it may lead --------------------------------------------------------------------------------------


async def test_nothing_is_fetched_unless_it_is_enabled() -> None:
    async with site(answer()) as server:
        with pytest.raises(BadInput, match="fetches none"):
            await fetch(f"http://127.0.0.1:{server.port}/", enabled=False)
        assert server.asked == []


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.2",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "127.1",
        "127.0.0.1.",
        "127。0。0。1",
        "①②⑦.⓪.⓪.①",
        "0.0.0.0",
        "0",
        "[::]",
        "10.0.0.1",
        "169.254.169.254",
        "[fe80::1%25eth0]",
        "255.255.255.255",
    ],
)
async def test_inner_address_is_never_asked(host: str) -> None:
    """However it is spelled; a server listens on all of them, so that a connection would be seen."""
    async with site(answer(), "0.0.0.0") as server:
        with pytest.raises(OmniBusError) as caught:
            await fetch(f"http://{host}:{server.port}/", allowed_networks=())

        assert server.asked == []
        assert isinstance(caught.value, BadInput)
        assert caught.value.field == "image_url.url"
        assert "127.0.0.1" not in caught.value.message


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.2"],
        ["10.0.0.1", "192.168.1.1"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["2002:7f00:1::"],
        ["fe80::1%lo"],
        ["not an address"],
        [],
    ],
)
async def test_name_of_an_inner_address_is_as_one_without_address(addresses: list[str]) -> None:
    """A stranger doesn't learn which names the inner network has."""
    with pytest.raises(Unreachable) as caught:
        await fetch("http://inner.example/", lookup=names(**{"inner.example": addresses}))
    with pytest.raises(Unreachable) as unknown:
        await fetch("http://inner.example/", lookup=names())

    assert caught.value.message == unknown.value.message


async def test_only_the_allowed_ones_of_a_names_addresses_are_tried() -> None:
    async with site(answer(), "0.0.0.0") as server:
        mixed = names(**{"mixed.example": ["127.0.0.2", "10.0.0.1", "127.0.0.1"]})
        assert await fetch(f"http://mixed.example:{server.port}/", lookup=mixed) == b"hello"


async def test_checked_address_is_the_one_connected_to() -> None:
    """A name server that answers with an inner address from the second time on is not asked a second time."""
    answers = [["127.0.0.1"], ["127.0.0.2"], ["127.0.0.2"]]
    num_lookups = 0

    def rebinding(host: str, port: int) -> list[str]:
        nonlocal num_lookups
        num_lookups += 1
        return answers[num_lookups - 1]

    async with site(answer(b"outer")) as outer:
        assert await fetch(f"http://rebinding.example:{outer.port}/", lookup=rebinding) == b"outer"
        assert num_lookups == 1


async def test_name_is_checked_anew_at_each_redirect() -> None:
    answers = [["127.0.0.1"], ["127.0.0.2"]]

    def rebinding(host: str, port: int) -> list[str]:
        return answers.pop(0)

    async with site(redirect("/again"), "0.0.0.0") as server:
        with pytest.raises(Unreachable, match="no address that may be fetched"):
            await fetch(f"http://rebinding.example:{server.port}/", lookup=rebinding)
        assert server.asked == ["/"]


@pytest.mark.parametrize(
    "to",
    [
        "http://127.0.0.2:{port}/x",
        "http://localhost:{port}/x",
        "http://[::1]:{port}/x",
        "//127.0.0.2:{port}/x",
        "http://2130706434:{port}/x",
        "http://10.0.0.1/latest/meta-data",
        "file:///etc/passwd",
        "gopher://127.0.0.1:{port}/x",
        "data:text/plain,x",
        "http://user:secret@127.0.0.1:{port}/x",
        "http://[::1",
        "",
        "/" + "x" * 8200,
    ],
)
async def test_redirect_leads_nowhere_else(to: str) -> None:
    async def script(path: str, writer: asyncio.StreamWriter) -> None:
        await redirect(to.format(port=server.port))(path, writer)

    async with site(script, "0.0.0.0") as server:
        lookup = names(localhost=["127.0.0.2", "::1"])
        with pytest.raises(BadInput) as caught:
            await fetch(f"http://127.0.0.1:{server.port}/", lookup=lookup)

        assert server.asked == ["/"]
        assert "127.0.0" not in caught.value.message
        assert "passwd" not in caught.value.message


async def test_redirects_end() -> None:
    async with site(redirect("/again")) as server:
        with pytest.raises(Unreachable, match=r"more than 2 redirects came \(allowed: 2\)"):
            await fetch(f"http://127.0.0.1:{server.port}/", max_redirects=2)
        assert len(server.asked) == 3


async def test_only_listed_hosts_are_asked() -> None:
    async with site(answer()) as server:
        lookup = names(**{"good.example": ["127.0.0.1"], "bad.example": ["127.0.0.1"]})
        assert await fetch(f"http://good.example:{server.port}/", lookup=lookup, allowed_hosts=("good.example",))
        with pytest.raises(BadInput, match=r"allowed: good\.example"):
            await fetch(f"http://bad.example:{server.port}/", lookup=lookup, allowed_hosts=("good.example",))
        with pytest.raises(BadInput, match=r"allowed: good\.example"):
            await fetch(f"http://127.0.0.1:{server.port}/", lookup=lookup, allowed_hosts=("good.example",))
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://example.com/x", "another scheme"),
        ("//example.com/x", "another scheme"),
        ("example.com", "another scheme"),
        ("", "another scheme"),
        ("http:///x", "no address that can be fetched"),
        ("http://exa mple/", "no address that can be fetched"),
        ("http://example.com:0/", "no address that can be fetched"),
        ("http://example.com:99999/", "no address that can be fetched"),
        ("http://[::1/", "no address that can be fetched"),
        ("http://a\x00b/", "no address that can be fetched"),
        ("http://user@example.com/", "user or password"),
        ("http://:password@example.com/", "user or password"),
        ("http://example.com/" + "x" * 9000, "of 9019 characters"),
    ],
)
async def test_what_is_no_address_is_refused_by_name(url: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        await fetch(url, lookup=names())
    assert caught.value.message.startswith("image_url.url: ")
    assert caught.value.field == "image_url.url"


def test_network_that_is_none_is_a_mistake_in_the_options() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"allowed_networks: .*10\.0\.0\.0/99"):
        msgspec.convert({"allowed_networks": ["10.0.0.0/99"]}, FetchOptions)


# --- what may come ------------------------------------------------------------------------------------------


async def endless(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 10_000)
        await writer.drain()


async def stalled(path: str, writer: asyncio.StreamWriter) -> None:
    """A beginning, and never the end."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx")
    await asyncio.get_running_loop().create_future()


async def silent(path: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.get_running_loop().create_future()


async def half(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")


async def garbage(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\x01\x02 no http\r\n\r\n")


async def long_head(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000)


def bomb(size: int) -> bytes:
    return gzip.compress(b"\0" * size)


def hollow() -> bytes:
    """Deflate blocks that unfold to nothing, more of them than the limit has bytes."""
    deflater = zlib.compressobj(wbits=-15)
    block = deflater.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + block * (2 * MAX_BYTES // len(block))


@pytest.mark.parametrize(
    "script",
    [
        endless,
        answer(b"x" * (MAX_BYTES + 1)),
        answer(bomb(50_000_000), Content_Encoding="gzip"),
        answer(hollow(), Content_Encoding="gzip"),
    ],
    ids=["endless", "a byte too long", "bomb", "hollow"],
)
async def test_too_much_is_cut_off(script: Script) -> None:
    async with site(script) as server:
        with pytest.raises(MediaTooLarge, match=r"image_url\.url: .* bytes came \(allowed: at most 100000\)"):
            await fetch(f"http://127.0.0.1:{server.port}/")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (stalled, "did not come within 0.3 s"),
        (silent, "did not come within 0.3 s"),
        (half, "broke off"),
        (garbage, "can't be reached"),
        (long_head, "can't be reached"),
        (answer(b"", "404 Not Found"), r"status 404 \(allowed: 200\)"),
        (answer(b"", "206 Partial Content"), r"status 206 \(allowed: 200\)"),
        (answer(b"", "304 Not Modified"), r"status 304 \(allowed: 200\)"),
        (answer(b"nope", Content_Encoding="gzip"), "damaged"),
        (answer(gzip.compress(b"hello")[:-9], Content_Encoding="gzip"), "damaged"),
        (answer(b"x", Content_Encoding="br"), r"allowed: identity, gzip, deflate"),
        (answer(b"x", Content_Encoding="gzip, gzip"), r"allowed: identity, gzip, deflate"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_what_does_not_come_well_is_unreachable(script: Script, words: str) -> None:
    async with site(script) as server:
        with pytest.raises(Unreachable, match=words):
            await fetch(f"http://127.0.0.1:{server.port}/", timeout_s=0.3 if script in (stalled, silent) else 20.0)


async def test_answer_that_does_not_begin_is_given_up() -> None:
    async with site(silent) as server:
        with pytest.raises(Unreachable, match=r"did not answer within 0\.1 s"):
            await fetch(f"http://127.0.0.1:{server.port}/", first_byte_timeout_s=0.1)


async def test_slow_name_server_costs_its_own_time_only() -> None:
    leave = threading.Event()

    def stuck(host: str, port: int) -> list[str]:
        leave.wait()
        return []

    try:
        with pytest.raises(Unreachable, match=r"did not answer within 0\.1 s"):
            await fetch("http://slow.example/", lookup=stuck, first_byte_timeout_s=0.1)
        assert await asyncio.to_thread(lambda: 1) == 1
    finally:
        leave.set()


async def test_closed_port_is_unreachable() -> None:
    async with site(answer()) as server:
        port = server.port
    with pytest.raises(Unreachable, match="can't be reached"):
        await fetch(f"http://127.0.0.1:{port}/")


async def test_untrusted_certificate_is_refused() -> None:
    async with site(answer()) as server:  # no TLS at all is the simplest of bad certificates
        with pytest.raises(Unreachable):
            await fetch(f"https://127.0.0.1:{server.port}/")


async def test_cancelled_fetch_closes_its_connection() -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nbegun")
        asked.set()
        assert await reader.read() == b""
        gone.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        task = asyncio.create_task(fetch(f"http://127.0.0.1:{port}/"))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone.wait()
