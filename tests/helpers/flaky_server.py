"""A server between a client and an object server, which answers late or not at all when told to."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
import time
import urllib.parse
from collections.abc import Iterator


class Faults:
    """What happens to the next requests for objects whose names contain `of`.

    Attributes:
      refused: the number of requests that are answered by 503.
      late: seconds that answers take longer.
      cut: whether answers end before their last byte.
      asked: ranges that were asked for, as (path, Range or '').
    """

    def __init__(self) -> None:
        self.of, self.refused, self.late, self.cut = '', 0, 0.0, False
        self.asked: list[tuple[str, str]] = []


@contextlib.contextmanager
def before(url: str) -> Iterator[tuple[str, Faults]]:
    """Yield the URL of a server that hands requests on to the one at `url`, and its faults."""
    faults, target = Faults(), urllib.parse.urlsplit(url).netloc

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def do_GET(self):
            if faults.of and faults.of in self.path:
                faults.asked.append((self.path, self.headers.get('Range', '')))
                time.sleep(faults.late)
                if faults.refused:
                    faults.refused -= 1
                    return self._answer(503, {}, b'<Error><Code>SlowDown</Code></Error>')
            self._hand_on()

        def _hand_on(self):
            body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
            connection = http.client.HTTPConnection(target)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            self._answer(answer.status, dict(answer.getheaders()), answer.read())

        do_PUT = do_POST = do_DELETE = do_HEAD = _hand_on

        def _answer(self, status, headers, body):
            self.send_response(status)
            left_out = {'content-length', 'transfer-encoding', 'connection', 'date', 'server'}
            for name, value in headers.items():
                if name.lower() not in left_out:
                    self.send_header(name, value)
            length = len(body)
            if self.command == 'HEAD':
                length = next((v for k, v in headers.items() if k.lower() == 'content-length'), 0)
            self.send_header('Content-Length', str(length))
            self.end_headers()
            cut = faults.cut and self.command == 'GET' and faults.of in self.path
            self.close_connection = self.close_connection or cut
            with contextlib.suppress(OSError):
                self.wfile.write(body[:-1] if cut else body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f'http://127.0.0.1:{server.server_port}', faults
        finally:
            server.shutdown()
