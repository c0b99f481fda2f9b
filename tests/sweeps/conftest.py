"""What the tests of sweeps share: a free port."""

import socket

import pytest


@pytest.fixture
def free_port():
    """Of 127.0.0.1; free a moment ago."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]
