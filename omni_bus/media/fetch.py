"""Media by its address, fetched for strangers: what they wrote decides where we connect, so every step is checked.

Names are resolved here, only addresses that are allowed go to the connector, and it connects to those and no others:
whatever the name's server answers next (DNS re-binding) is never asked for. Redirects are followed by hand and start
from the beginning. Size, time and redirects are bounded; what comes back is bytes, whose type nobody is believed about.

Refusals name the caller's field and what is allowed, never an address that a name resolved to, nor where a redirect
led: a stranger must not learn of the inner network by them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver
from yarl import URL

import omni_bus
from omni_bus.errors import BadInput, Unreachable
from omni_bus.media.addresses import Address, AllowedAddresses, literal, matches
from omni_bus.media.spool import Spool, too_large

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiohttp.abc import ResolveResult

    Lookup = Callable[[str, int], list[str]]

MAX_URL_CHARACTERS = 8192

MAX_CONNECTIONS = 32
"""At a time; a fetch that waits for one spends its own time."""

LOOKUP_THREADS = 4
"""`getaddrinfo` blocks as long as a stranger's name server likes; others' lookups on the loop's threads don't wait."""

INFLATE_BYTES = 256 * 1024

_REDIRECTS = (301, 302, 303, 307, 308)
_ENCODINGS = ("identity", "gzip", "deflate")

_NO_ADDRESS = "its host has no address that may be fetched from (allowed: public addresses)"
"""Said of names without any address and of names with inner addresses alike."""


class FetchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be fetched, and within which bounds."""

    enabled: bool = False
    """Fetch media from http and https addresses that requests name."""
    allowed_hosts: tuple[str, ...] = ()
    """Only these hosts, as ``images.example.com`` or ``*.example.org``; by default every host with a public address."""
    allowed_networks: tuple[str, ...] = ()
    """Networks that may be fetched from although they are not public, as ``10.1.0.0/16``."""
    max_redirects: Annotated[int, msgspec.Meta(ge=0, le=20)] = 3
    """Redirects that one fetch follows."""
    first_byte_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """A server may take so long, from the name's lookup on, to begin its answer."""

    def __post_init__(self) -> None:
        try:
            AllowedAddresses(self.allowed_networks)
        except ValueError as error:
            raise ValueError(
                f"allowed_networks: {error} (allowed: networks in CIDR notation, as 10.1.0.0/16)"
            ) from None


class _NotAllowed(OSError):
    """A name without an address that may be connected to."""


class CheckedResolver(AbstractResolver):
    """Resolves names to the allowed ones of their addresses.

    Args:
        allowed: which addresses those are.
        lookup: returns the addresses of a host for a port, blocking; raises OSError.
    """

    def __init__(self, allowed: AllowedAddresses, lookup: Lookup) -> None:
        self._allowed = allowed
        self._lookup = lookup
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="lookup")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return what the connector may connect to.

        Raises:
            OSError: nothing.
        """
        found = await asyncio.get_running_loop().run_in_executor(self._threads, self._lookup, host, port)
        addresses = [address for text in found if (address := _parsed(text)) is not None and address in self._allowed]
        if not addresses:
            raise _NotAllowed(host)
        return [
            {
                "hostname": host,
                "host": str(address),
                "port": port,
                "family": socket.AF_INET if address.version == 4 else socket.AF_INET6,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            }
            for address in addresses
        ]

    async def close(self) -> None:
        """Let the threads go; a lookup that hangs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _parsed(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def look_up(host: str, port: int) -> list[str]:
    """Return a host's addresses; blocks.

    Raises:
        OSError: there is none, or no answer.
    """
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Fetcher:
    """Fetches media over http and https. Made on a loop; `close` at the end.

    Args:
        options: what is allowed.
        lookup: for tests that play a name server.
        tls: certificates to trust instead of the system's.
    """

    def __init__(self, options: FetchOptions, *, lookup: Lookup = look_up, tls: ssl.SSLContext | None = None) -> None:
        self._options = options
        self._allowed = AllowedAddresses(options.allowed_networks)
        self._resolver = CheckedResolver(self._allowed, lookup)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=self._resolver,
                use_dns_cache=False,
                limit=MAX_CONNECTIONS,
                force_close=True,
                ssl=tls if tls is not None else True,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # no proxy, no netrc: the environment's are the operator's, not a stranger's
            timeout=aiohttp.ClientTimeout(total=None),
            headers={
                "User-Agent": f"omni-bus/{omni_bus.__version__}",
                "Accept": "*/*",
                "Accept-Encoding": "identity",
            },
        )

    async def close(self) -> None:
        """Break open fetches off."""
        await self._session.close()
        await self._resolver.close()

    async def fetch(self, url: str, spool: Spool, *, field: str, timeout_s: float) -> None:
        """Fetch what is at an address into `spool`, which bounds its size.

        Args:
            url: as the caller wrote it.
            spool: takes the bytes, as they are after their content encoding.
            field: the caller's field, for refusals.
            timeout_s: limit of all of it, redirects included.

        Raises:
            BadInput: the address is not one that may be fetched.
            Unreachable: nothing came, or not in time, or not with status 200.
            MediaTooLarge: more than `spool` takes.
        """
        if not self._options.enabled:
            raise BadInput(
                f"{field}: an http address came, and this server fetches none (allowed: a data: URL)", field=field
            )
        try:
            async with asyncio.timeout(timeout_s):
                await self._follow(_parse(url, field), spool, field)
        except TimeoutError:
            raise Unreachable(f"{field}: it did not come within {timeout_s:g} s", field=field) from None
        except aiohttp.ClientConnectorCertificateError:
            raise Unreachable(f"{field}: its server's certificate is not valid", field=field) from None
        except aiohttp.ClientConnectorDNSError:
            raise Unreachable(f"{field}: {_NO_ADDRESS}", field=field) from None
        except aiohttp.InvalidURL:
            raise _bad_url(field) from None
        except (aiohttp.ClientError, ConnectionError, ssl.SSLError) as error:
            what = "broke off" if isinstance(error, aiohttp.ClientPayloadError) else "can't be reached"
            raise Unreachable(f"{field}: its server {what}", field=field) from None

    async def _follow(self, url: URL, spool: Spool, field: str) -> None:
        for _ in range(self._options.max_redirects + 1):
            self._check(url, field)
            async with await self._get(url, field) as response:
                if response.status in _REDIRECTS:
                    url = _next(response, field)
                    continue
                if response.status != 200:
                    raise Unreachable(
                        f"{field}: its server answered with status {response.status} (allowed: 200)", field=field
                    )
                async for piece in _decoded(response, spool, field):
                    await spool.write(piece)
                await spool.flush()
                return
        raise Unreachable(
            f"{field}: more than {self._options.max_redirects} redirects came (allowed: {self._options.max_redirects})",
            field=field,
        )

    def _check(self, url: URL, field: str) -> None:
        """Refuse an address, of a redirect or the first one, that may not be fetched.

        Raises:
            BadInput: names what is allowed.
        """
        if url.scheme not in ("http", "https"):
            raise BadInput(f"{field}: another scheme than http or https came", field=field)
        if url.raw_user is not None or url.raw_password is not None:
            raise BadInput(f"{field}: an address with a user or password came (allowed: none)", field=field)
        host = url.raw_host
        if not host or not url.port:
            raise _bad_url(field)
        try:
            address = literal(host.lower())
        except ValueError:
            raise _bad_url(field) from None
        if self._options.allowed_hosts and not matches(host, self._options.allowed_hosts):
            allowed = ", ".join(self._options.allowed_hosts)
            raise BadInput(f"{field}: its host is not one to fetch from (allowed: {allowed})", field=field)
        # The connector takes an address that is spelled out as it is, without asking the resolver.
        if address is not None and address not in self._allowed:
            raise BadInput(f"{field}: {_NO_ADDRESS}", field=field)

    async def _get(self, url: URL, field: str) -> aiohttp.ClientResponse:
        limit_s = self._options.first_byte_timeout_s
        first = asyncio.timeout(limit_s)
        try:
            async with first:
                return await self._session.get(url, allow_redirects=False)
        except TimeoutError:
            if not first.expired():
                raise
            raise Unreachable(f"{field}: its server did not answer within {limit_s:g} s", field=field) from None


def _bad_url(field: str) -> BadInput:
    return BadInput(
        f"{field}: no address that can be fetched came (allowed: http://HOST/… or https://HOST/…)", field=field
    )


def _parse(url: str, field: str) -> URL:
    if len(url) > MAX_URL_CHARACTERS:
        raise BadInput(
            f"{field}: an address of {len(url)} characters came (allowed: at most {MAX_URL_CHARACTERS})", field=field
        )
    try:
        return URL(url.strip())
    except ValueError:
        raise _bad_url(field) from None


def _next(response: aiohttp.ClientResponse, field: str) -> URL:
    """Return where a redirect leads."""
    location = response.headers.get("Location", "")
    if not location or len(location) > MAX_URL_CHARACTERS:
        raise Unreachable(f"{field}: its server redirects to nowhere", field=field)
    try:
        return response.url.join(URL(location))
    except ValueError:
        raise Unreachable(f"{field}: its server redirects to nowhere", field=field) from None


async def _decoded(response: aiohttp.ClientResponse, spool: Spool, field: str) -> AsyncIterator[bytes]:
    """Yield the body's pieces after its content encoding; what is unfolded is never more than `INFLATE_BYTES` ahead.

    What comes in is bounded like what comes out: a stream of empty blocks unfolds to nothing, for ever.
    """
    max_bytes = spool.max_bytes
    length = response.content_length
    if length is not None and length > max_bytes:
        raise too_large(field, f"{length}", max_bytes)
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in _ENCODINGS:
        raise Unreachable(
            f"{field}: its server answered with another content encoding (allowed: {', '.join(_ENCODINGS)})",
            field=field,
        )
    inflater: Any = None if encoding == "identity" else zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    num_bytes = 0
    try:
        async for piece in response.content.iter_any():
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise too_large(field, f"more than {max_bytes}", max_bytes)
            if inflater is None:
                yield piece
                continue
            rest, is_more = piece, True
            while is_more:
                unfolded = inflater.decompress(rest, INFLATE_BYTES)
                yield unfolded
                rest = inflater.unconsumed_tail
                is_more = not inflater.eof and (bool(rest) or len(unfolded) == INFLATE_BYTES)
                await asyncio.sleep(0)  # others have their turn between two steps of a bomb
        if inflater is not None and not inflater.eof:
            raise Unreachable(f"{field}: its content encoding is damaged", field=field)
    except zlib.error:
        raise Unreachable(f"{field}: its content encoding is damaged", field=field) from None
    finally:
        with contextlib.suppress(aiohttp.ClientError):
            response.close()
