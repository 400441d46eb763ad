"""Names that other machines cannot use."""

import pytest

from envfleet.launchers.loopback import is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("localhost", True),
        ("10.1.2.3", False),
        ("fe80::1%lo", False),
        ("2001:db8::1", False),
        ("no-such-host.invalid", True),  # it has no address at all
        ("a" * 300, True),  # no host can have this name
    ],
)
def test_is_loopback(host, expected):
    assert is_loopback(host) is expected
