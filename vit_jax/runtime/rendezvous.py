"""Rendezvous of a job's processes, before JAX joins them.

Process 0 listens at the coordinator's port until every other process has connected, and then frees
the port for JAX's service. JAX itself waits silently for missing processes, and connects to any
program that has the port.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from vit_jax.errors import EXIT_FAILED, Unavailable, UserError, one_line

WAIT_SECONDS = 300.0  # for all processes to connect, as in JAX
PORT_SECONDS = 15.0  # for a port to become free, for example of a job that is ending
STRANGER_SECONDS = 20.0  # for another program to leave the address to process 0
FIRST_LINE_SECONDS = 10.0  # of silence before the first line
REPEAT_SECONDS = 60.0  # between lines
_ANSWER_SECONDS = 5.0
_PAUSE = 0.5  # seconds between two attempts
_LONGEST = 1 << 16  # bytes of a message
_SHOWN = 4  # processes in a line
ANOTHER = 'choose another port by --coordinator HOST:PORT or JAX_COORDINATOR_PORT'


class PeerTimeout(Unavailable):
    """A process of the job did not connect in time."""


class Host:
    """Process 0 of a job, at the port to which the others connect; a context manager.

    Args:
      address: Address to listen at, such as '[::]:8476'.
      count: Number of processes.

    Raises:
      UserError: if another program has the port, or it cannot be listened at.
    """

    def __init__(self, address: str, count: int):
        self._address, self._count = address, count
        self._guests: dict[int, socket.socket] = {}
        self._strangers: dict[socket.socket, bytes] = {}
        self._listening = _listen(address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._clock = _Clock()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, UserError):
            code = getattr(error, 'exit_code', 2)
            self._tell({'error': str(error), 'code': code})
        self.leave_port()
        for connection in (*self._strangers, *self._guests.values()):
            connection.close()

    def wait(self) -> None:
        """Wait for all other processes.

        Raises:
          Late: if some do not come.
          UserError: if two have the same number, or disagree about the size of the job.
        """
        while missing := [i for i in range(1, self._count) if i not in self._guests]:
            if self._clock.over():
                raise PeerTimeout(
                    f'{_format_processes(missing)} of {self._count} did not connect to '
                    f'{self._address} in {WAIT_SECONDS:g} s: look for their errors, and start all '
                    'processes again'
                )
            if self._clock.due():
                _print_line(
                    f'process 0 of {self._count} waits at {self._address} for '
                    f'{_format_processes(missing)}'
                )
                self._tell({'missing': _format_processes(missing)})
            for key, _ in self._selector.select(_PAUSE):
                self._receive(key.fileobj)

    def leave_port(self) -> None:
        """Stop listening, so that another server can; connected processes stay connected."""
        self._selector.close()
        self._listening.close()

    def start(self) -> None:
        """Tell all processes that JAX's service is running."""
        self._tell({'start': True})

    def _receive(self, source: Any) -> None:
        if source is self._listening:
            connection, _ = self._listening.accept()
            connection.setblocking(False)
            self._strangers[connection] = b''
            self._selector.register(connection, selectors.EVENT_READ)
            return
        try:
            received = source.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            received = b''
        if not received or source not in self._strangers:
            self._forget(source)
            return
        text = self._strangers[source] = self._strangers[source] + received
        if b'\n' in text or len(text) > _LONGEST:
            self._greet(source, _message(text))

    def _greet(self, source: socket.socket, hello: Any) -> None:
        """Admit a process of the job; close any other connection."""
        process, count = hello.get('process'), hello.get('count')
        if type(process) is not int or type(count) is not int:
            self._forget(source)
            return
        del self._strangers[source]
        if (guest := self._guests.get(process)) is not None and _has_left(guest):
            self._forget(guest)
        _send(source, {'welcome': process})
        mistake = self._mistake(process, count)
        self._guests[-1 if mistake else process] = source  # also notify the refused process
        if mistake:
            raise UserError(mistake)
        self._clock.restart()

    def _mistake(self, process: int, count: int) -> str:
        if count != self._count:
            return (
                f'process {process} was started as one of {count}, process 0 as one of '
                f'{self._count}: give all the same --num-processes'
            )
        if process in self._guests or not 0 < process < count:
            return f'two processes have --process-id {process}: give each its own'
        return ''

    def _forget(self, source: socket.socket) -> None:
        self._selector.unregister(source)
        self._strangers.pop(source, None)
        for process, connection in list(self._guests.items()):
            if connection is source:
                del self._guests[process]
                self._clock.restart()
        source.close()

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in self._guests.values():
            _send(connection, message)


def join(address: str, process: int, count: int) -> None:
    """Wait until process 0 is at the address and all others have connected.

    Args:
      address: HOST:PORT of process 0.
      process: The number of this process.
      count: Number of processes.

    Raises:
      Late: if process 0 or another does not come.
      UserError: if another program has the port, or process 0 reports a mistake.
    """
    name, reason = f'process {process} of {count}', ''
    clock, stranger_since = _Clock(), None
    while not clock.over():
        try:
            with socket.create_connection(_split(address), timeout=_ANSWER_SECONDS) as connection:
                _send(connection, {'process': process, 'count': count})
                if _wait_for_start(connection, name, clock):
                    return
            reason, stranger_since = 'it left before all had connected', None
        except _Stranger:
            reason, stranger_since = 'another program answers', stranger_since or time.monotonic()
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, ConnectionRefusedError):  # the port is free
                stranger_since = None
        if stranger_since and time.monotonic() - stranger_since > STRANGER_SECONDS:
            raise Unavailable(
                f'{address} answers, but not as process 0 of this job: another program has the '
                f'port; {ANOTHER}, the same for all processes'
            )
        if clock.due():
            _print_line(f'{name} waits for process 0 at {address} ({reason})')
        time.sleep(_PAUSE)
    raise PeerTimeout(
        f'process 0 was not at {address} in {WAIT_SECONDS:g} s ({reason}): look for its error, and '
        'start all processes again'
    )


class _Stranger(Exception):
    """Program at the address is not process 0."""


def _wait_for_start(connection: socket.socket, name: str, clock: _Clock) -> bool:
    """Return whether all have connected; False if process 0 has left.

    Raises:
      _Stranger: if another program answers.
      PeerError: the mistake that process 0 reports.
    """
    messages = _read_messages(connection, clock)
    if not isinstance(next(messages, {}).get('welcome'), int):
        raise _Stranger
    connection.settimeout(_PAUSE)
    for message in messages:
        if 'error' in message:
            raise PeerError(str(message['error']), int(message.get('code', EXIT_FAILED)))
        if 'missing' in message:
            _print_line(f'{name} waits for {message["missing"]}')
        if 'start' in message:
            return True
    return False


def _read_messages(connection: socket.socket, clock: _Clock) -> Iterator[dict[str, Any]]:
    """Yield the messages of a connection until it ends."""
    text, welcomed = b'', False
    while not clock.over(2 * _ANSWER_SECONDS):
        try:
            part = connection.recv(_LONGEST)
        except TimeoutError:
            if not welcomed:
                raise _Stranger from None
            continue
        if not part:
            return
        text += part
        while b'\n' in text:
            line, _, text = text.partition(b'\n')
            welcomed = True
            yield _message(line)
        if len(text) > _LONGEST:
            return


class PeerError(UserError):
    """A user's mistake that another process of the job reports.

    Args:
      message: The user's mistake.
      exit_code: Exit code of the other process.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class _Clock:
    """Time that a process has waited, and times to print it."""

    def __init__(self) -> None:
        self._end = time.monotonic() + WAIT_SECONDS
        self.restart()

    def over(self, more: float = 0.0) -> bool:
        return time.monotonic() > self._end + more

    def restart(self) -> None:
        self._next = time.monotonic() + FIRST_LINE_SECONDS

    def due(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + REPEAT_SECONDS
        return True


def _listen(address: str) -> socket.socket:
    """Return a socket that listens at the address, once the port is free."""
    host, port = _split(address)
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    dual = host == '::' and socket.has_dualstack_ipv6()
    if host == '::' and not dual:
        host, family = '', socket.AF_INET
    end = time.monotonic() + PORT_SECONDS
    while True:
        try:
            return socket.create_server(
                (host, port), family=family, backlog=1024, dualstack_ipv6=dual
            )
        except (OSError, OverflowError) as error:
            code = error.errno if isinstance(error, OSError) else None
            if code == errno.EADDRINUSE and time.monotonic() < end:
                time.sleep(_PAUSE)
                continue
            is_busy = code == errno.EADDRINUSE  # which may end, or not be so on the next node
            reason = 'another program has the port' if is_busy else str(error)
            raise (Unavailable if is_busy else UserError)(
                f'the coordinator cannot listen at port {port} of this machine ({reason}): '
                f'{ANOTHER}, the same for all processes'
            ) from error


def _has_left(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(':')
    return host.removeprefix('[').removesuffix(']'), int(port)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # those who wait will miss a process that left
        connection.sendall(json.dumps(message).encode() + b'\n')


def _message(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(message := json.loads(text), dict):
            return message
    return {}


def _format_processes(processes: Iterable[int]) -> str:
    """Numbers of processes as 'process 3' or 'processes 1, 2, 3, 4 and 60 more'."""
    numbers = [str(number) for number in processes]
    listed_numbers = ', '.join(numbers[:_SHOWN])
    more = f' and {len(numbers) - _SHOWN} more' if len(numbers) > _SHOWN else ''
    return f'process{"es" * (len(numbers) > 1)} {listed_numbers}{more}'


def _print_line(line: str) -> None:
    print(one_line(line), file=sys.stderr, flush=True)
