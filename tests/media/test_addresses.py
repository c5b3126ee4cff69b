"""No spelling of an inner address passes for an outer one."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.media.addresses import AllowedAddresses, is_public, literal, matches


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.8",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.19.255.255",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "::ffff:0:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::808:808",
        "64:ff9b:1::a00:1",
        "100::1",
        "2001::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:808:808::1",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700::1%eth0",
        "fec0::1",
        "ff02::1",
    ],
)
def test_inner_address_is_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))
    assert ipaddress.ip_address(text) not in AllowedAddresses()


@pytest.mark.parametrize("text", ["1.1.1.1", "100.63.255.255", "172.32.0.1", "223.255.255.255", "2606:4700::1111"])
def test_outer_address_is_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@given(st.ip_addresses())
def test_public_addresses_are_global_to_the_standard_library_too(address) -> None:
    """The tables are ours, but may only be stricter."""
    assert not is_public(address) or (address.is_global and not address.is_multicast)


@given(st.ip_addresses(v=4))
def test_an_address_within_another_is_never_public(inner: ipaddress.IPv4Address) -> None:
    number = int(inner)
    for outer in (number, 0xFFFF << 32 | number, 0x64FF9B << 96 | number, 0x2002 << 112 | number << 80):
        assert not is_public(ipaddress.IPv6Address(outer))


def test_named_network_is_allowed_and_no_other() -> None:
    allowed = AllowedAddresses(["10.1.0.0/16", "fd00::/8", "127.0.0.1"])

    for text, is_in in (("10.1.2.3", True), ("10.2.0.1", False), ("fd01::1", True), ("fe80::1", False)):
        assert (ipaddress.ip_address(text) in allowed) is is_in
    assert ipaddress.ip_address("127.0.0.1") in allowed
    assert ipaddress.ip_address("::ffff:10.1.2.3") not in allowed
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/99"):
        AllowedAddresses(["10.0.0.0/99"])


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0x7f.0x0.0x0.0x1",
        "0177.0.0.1",
        "127.1",
        "127.0.1",
        "127.0.0.1.",
        "127.0.0.256",
        "1.2.3.4.5",
        "example.0x",
        "example.7",
        "[::1]",
        "a b",
        "a%2eb",
        "ex%00a",
        "a..b",
        "-a.example",
        "a" * 64,
        "a." * 127 + "aa",
        "",
        ".",
        "exämple",
    ],
)
def test_address_in_disguise_is_no_host(host: str) -> None:
    with pytest.raises(ValueError, match="not"):
        literal(host)


def test_names_and_addresses_are_told_apart() -> None:
    assert literal("example.com") is None
    assert literal("xn--exmple-cua.com.") is None
    assert literal("_dmarc.7.example") is None
    assert literal("8.8.8.8") == ipaddress.ip_address("8.8.8.8")
    assert literal("::1") == ipaddress.ip_address("::1")


@pytest.mark.parametrize(
    ("host", "is_match"),
    [
        ("images.example.com", True),
        ("IMAGES.example.com.", True),
        ("a.example.org", True),
        ("a.b.example.org", True),
        ("example.org", False),
        (".example.org", False),
        ("evilexample.org", False),
        ("example.com", False),
        ("images.example.com.evil.net", False),
    ],
)
def test_hosts_match_whole_labels(host: str, is_match) -> None:
    assert matches(host, ("images.example.com", "*.example.org")) is is_match
