"""Processes that meet before JAX joins them, here threads of one process."""

import socket
import threading
import time

import pytest
from helpers.messages import mentions

from vit_jax.errors import UserError
from vit_jax.runtime import rendezvous


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return f'127.0.0.1:{probe.getsockname()[1]}'


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(rendezvous, '_PAUSE', 0.02)
    monkeypatch.setattr(rendezvous, 'PORT_SECONDS', 0.1)
    monkeypatch.setattr(rendezvous, 'STRANGER_SECONDS', 0.1)
    monkeypatch.setattr(rendezvous, '_ANSWER_SECONDS', 2.0)


def host(address, count):
    with rendezvous.Host(address, count) as opened:
        opened.wait()
        opened.leave_port()
        opened.start()


def meet(*calls):
    """What each of the calls, made at the same time, raises; None for nothing."""
    found = [None] * len(calls)

    def run(number, function, *args):
        try:
            function(*args)
        except UserError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(i, *call)) for i, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def test_all_come_in_any_order(address):
    joins = [(rendezvous.join, address, process, 4) for process in (3, 1, 2)]
    assert meet(*joins, (host, address, 4)) == [None] * 4


@pytest.mark.fault(133)
@pytest.mark.parametrize(
    ('joins', 'said'),
    [
        ([(1, 3)], ('process 1', '3', 'process 0', '2')),
        ([(1, 3), (1, 3)], 'two processes have --process-id 1'),
    ],
)
def test_numbers_that_do_not_fit_are_told_to_all(address, joins, said):
    count = 2 if len(joins) == 1 else 3
    found = meet((host, address, count), *[(rendezvous.join, address, *one) for one in joins])
    assert all(mentions(str(error), said) for error in found)
    assert {getattr(error, 'exit_code', 2) for error in found} == {2}


@pytest.mark.fault(133)
def test_those_who_do_not_come_are_named(address, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, 'FIRST_LINE_SECONDS', 0.1)
    monkeypatch.setattr(rendezvous, 'WAIT_SECONDS', 1.0)
    found = meet((host, address, 8), (rendezvous.join, address, 2, 8))
    assert all(mentions(str(e), '1, 3, 4, 5', '2 more', '8', 'connect') for e in found)
    assert {error.exit_code for error in found} == {1}
    said = capsys.readouterr().err
    assert f'process 0 of 8 waits at {address} for processes 1, 3' in said
    assert mentions(said, 'process 2 of 8', '1, 3, 4, 5', '2 more')


@pytest.mark.fault(133)
def test_process_0_that_does_not_come_is_named(address, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, 'FIRST_LINE_SECONDS', 0.1)
    monkeypatch.setattr(rendezvous, 'WAIT_SECONDS', 0.5)
    with pytest.raises(rendezvous.PeerTimeout, match=f'process 0 was not at {address}'):
        rendezvous.join(address, 1, 2)
    assert mentions(
        capsys.readouterr().err, 'process 1 of 2', 'process 0', address, 'Connection', 'refused'
    )


def test_who_leaves_may_come_again(address):
    started = threading.Thread(target=host, args=(address, 3))
    started.start()
    for _ in range(2):
        with connected(address) as visitor:
            visitor.sendall(b'{"process": 1, "count": 3}\n')
            assert b'welcome' in visitor.recv(100)
    assert meet(*[(rendezvous.join, address, process, 3) for process in (1, 2)]) == [None] * 2
    started.join(30)
    assert not started.is_alive()


@pytest.mark.parametrize('noise', [b'GET / HTTP/1.1\r\n\r\n', b'\xff' * 100_000, b'[1]\n', b''])
def test_strangers_who_call_are_sent_away(address, noise):
    started = threading.Thread(target=host, args=(address, 2))
    started.start()
    with connected(address) as visitor:
        visitor.sendall(noise)
        assert meet((rendezvous.join, address, 1, 2)) == [None]
    started.join(30)
    assert not started.is_alive()


def connected(address):
    name, _, port = address.rpartition(':')
    for _ in range(100):
        try:
            return socket.create_connection((name, int(port)), timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise AssertionError('nobody listens')


@pytest.mark.fault(129)
@pytest.mark.parametrize('talks', [True, False])
def test_a_port_of_another_program(address, talks, monkeypatch):
    monkeypatch.setattr(rendezvous, '_ANSWER_SECONDS', 0.2)
    port = int(address.rpartition(':')[2])
    with socket.create_server(('127.0.0.1', port)) as other:
        if talks:
            threading.Thread(target=other.accept, daemon=True).start()
        found = meet((host, f'[::]:{port}', 2), (rendezvous.join, address, 1, 2))
    assert all(str(port) in str(error) for error in found)
    assert all(mentions(str(error), 'program', 'port') for error in found)
    assert {error.exit_code for error in found} == {1}, 'which may end'
