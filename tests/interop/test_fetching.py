"""Checkpoints in object storage and on the web: whole copies in the user's cache folder."""

import base64
import contextlib
import hashlib
import http.server
import os
import re
import threading

import fsspec
import fsspec.implementations.memory
import numpy as np
import pytest
from helpers import mounts
from helpers.messages import mentions
from helpers.object_servers import SCHEMES, serve_bucket

from vit_jax import __main__ as cli
from vit_jax.errors import URLS, UserError
from vit_jax.interop import files
from vit_jax.runtime import caches
from vit_jax.storage import cache, servers

CONTENT = np.arange(3000.0, dtype=np.float32)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr(cache, 'PAUSE', 0)
    monkeypatch.setattr(servers, 'TRIES', 1)
    for name in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'all_proxy'):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / 'cache'


class Handler(http.server.BaseHTTPRequestHandler):
    """Files in memory with etags, of which parts may be asked for."""

    protocol_version = 'HTTP/1.1'

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server = self.server
        if server.login and self.headers.get('Authorization') != server.login:
            return self.answer(401, b'', {})
        if server.status:
            return self.answer(server.status, b'', {})
        if (content := server.files.get(self.path)) is None:
            return self.answer(404, b'', {})
        headers = {'ETag': f'"{hashlib.md5(content).hexdigest()}"', 'Accept-Ranges': 'bytes'}
        size, status = len(content), 200
        if asked := re.match(r'bytes=(\d+)-(\d+)', self.headers.get('Range', '')):
            first, last = int(asked[1]), min(int(asked[2]), size - 1)
            headers['Content-Range'] = f'bytes {first}-{last}/{size}'
            content, status = content[first : last + 1], 206
        if self.command == 'GET':
            server.sent.append(self.path)
            server.cuts -= 1
        return self.answer(status, content, headers)

    def answer(self, status, content, headers):
        self.send_response(status)
        sized = {'Content-Length': len(content)}
        length = {'Transfer-Encoding': 'chunked'} if self.server.chunked else sized
        for name, value in {**headers, **length}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == 'GET':
            cut = self.server.cuts >= 0
            content = content[:100] if cut else content
            self.server.bytes += len(content)
            self.wfile.write(b'FFFF\r\n' + content if self.server.chunked else content)
            self.close_connection = cut

    def log_message(self, *args):
        """Silent."""


@pytest.fixture
def web(tmp_path):
    """A web server with `a.npz`; `url` is its address."""
    with contextlib.closing(http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)) as server:
        server.close = server.server_close
        server.status, server.cuts, server.sent, server.login = 0, 0, [], ''
        server.bytes, server.chunked = 0, False
        server.files = {'/a.npz': npz(tmp_path, CONTENT)}
        server.url = f'http://127.0.0.1:{server.server_port}'
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def npz(tmp_path, array):
    files.write_npz(tmp_path / 'made.npz', {'a': array})
    return (tmp_path / 'made.npz').read_bytes()


def assert_read(url, array=CONTENT):
    np.testing.assert_array_equal(files.read_arrays(url)[0]['a'], array)


def one_line(url, *words, code=2):
    with pytest.raises(UserError) as error:
        files.read_arrays(url)
    assert getattr(error.value, 'exit_code', 2) == code, '1 if time may mend it'
    assert '\n' not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_file_is_downloaded_once_until_it_changes(web, tmp_path):
    for _ in range(2):
        assert_read(f'{web.url}/a.npz')
    assert web.sent == ['/a.npz']
    web.files['/a.npz'] = npz(tmp_path, CONTENT + 1)
    assert_read(f'{web.url}/a.npz', CONTENT + 1)


@pytest.mark.parametrize('scheme', SCHEMES)
@pytest.mark.slow
def test_buckets(scheme, tmp_path, cache_folder):
    files.write_safetensors(tmp_path / 'folder', {'a': CONTENT}, {'k': 1})
    with serve_bucket(scheme) as bucket:
        system, root = fsspec.core.url_to_fs(bucket)
        system.put(str(tmp_path / 'folder'), f'{root}/folder', recursive=True)
        for name in ('folder', 'folder/model.safetensors'):
            assert_read(f'{bucket}/{name}')
        one_line(f'{bucket}/none.npz', 'no such file')
        assert files.read_arrays(f'{bucket}/folder')[1] == {'k': 1}
        system.pipe(f'{root}/folder/config.json', b'{"k": 2}')
        assert files.read_arrays(f'{bucket}/folder')[1] == {'k': 2}
    # The server is gone.
    if scheme == 'gs':
        assert files.read_arrays(f'{bucket}/folder')[1] == {'k': 2}


@pytest.mark.fault(93)
def test_a_connection_that_breaks_is_resumed(web, monkeypatch):
    monkeypatch.setattr(cache, 'BLOCK', 5000)
    web.cuts = 2
    assert_read(f'{web.url}/a.npz')
    assert web.bytes == len(web.files['/a.npz']) + 2 * 100, 'blocks that arrived are not sent again'


@pytest.mark.fault(93)
def test_a_connection_that_always_breaks_is_one_line(web, cache_folder):
    web.cuts = 100
    one_line(f'{web.url}/a.npz', f'{web.url}/a.npz', code=1)
    assert [p for p in cache_folder.rglob('*') if p.is_file()] == []
    web.cuts = 0
    assert_read(f'{web.url}/a.npz')


@pytest.mark.fault(93)
def test_a_file_of_unknown_size_that_breaks_off_is_not_kept(web, cache_folder):
    web.cuts, web.chunked = 100, True
    one_line(f'{web.url}/a.npz', f'{web.url}/a.npz', code=1)
    assert [p for p in cache_folder.rglob('*') if p.is_file()] == []


@pytest.mark.fault(93)
def test_a_copy_damaged_in_the_cache_is_downloaded_anew(web, cache_folder):
    assert_read(f'{web.url}/a.npz')
    (copy,) = cache_folder.rglob('a.npz')
    copy.write_bytes(copy.read_bytes()[:-1] + b'x')
    assert_read(f'{web.url}/a.npz')
    assert web.sent == ['/a.npz', '/a.npz']


@pytest.mark.fault(93)
def test_other_content_than_announced_is_not_kept(tmp_path, cache_folder, monkeypatch):
    memory = fsspec.implementations.memory.MemoryFileSystem
    memory().pipe('/b/a.npz', npz(tmp_path, CONTENT))
    info = memory.info
    monkeypatch.setattr(memory, 'info', lambda *args: {**info(*args), 'md5Hash': 'AAAA'})
    one_line('memory://b/a.npz', 'MD5', code=1)
    monkeypatch.setattr(memory, 'info', lambda *args: {**info(*args), 'etag': os.urandom(9).hex()})
    one_line('memory://b/a.npz', 'changed', 'download', code=1)
    assert list(cache_folder.rglob('a.npz')) == []


@pytest.mark.parametrize(
    ('status', 'words'),
    [(403, ['access is denied', 'credentials']), (401, ['access is denied']), (500, ['500'])],
)
@pytest.mark.fault(94)
def test_a_server_that_refuses(status, words, web):
    web.status = status
    one_line(f'{web.url}/a.npz', *words, code=1 if status == 500 else 2)


@pytest.mark.fault(94)
def test_a_missing_file(web):
    one_line(f'{web.url}/b.npz', 'no such file')
    one_line(f'{web.url}/folder', 'folder/model.safetensors', 'no such file')


@pytest.mark.fault(95)
def test_without_a_network_the_copy_is_used(web, caplog):
    assert_read(f'{web.url}/a.npz')
    web.shutdown()
    web.server_close()
    servers.connect.cache_clear()
    assert_read(f'{web.url}/a.npz')
    assert 'nothing answers' in caplog.text and 'using the copy' in caplog.text
    one_line(f'{web.url}/b.npz', 'nothing answers at 127.0.0.1', 'connected', 'network', code=1)
    one_line('https://nowhere.invalid/a.npz', 'nothing answers at nowhere.invalid', code=1)


@pytest.mark.fault(96)
def test_a_full_disk(web, tmp_path, monkeypatch):
    with mounts.small_disk(tmp_path / 'small', 8192) as small:
        monkeypatch.setenv('XDG_CACHE_HOME', str(small))
        with pytest.raises(UserError, match=r'(?s)cannot keep a.npz .*No space.*XDG_CACHE_HOME'):
            files.read_arrays(f'{web.url}/a.npz')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    assert_read(f'{web.url}/a.npz')


def test_the_cache_is_bounded(web, cache_folder, monkeypatch):
    for name in ('b', 'c'):
        web.files[f'/{name}.npz'] = web.files['/a.npz']
    monkeypatch.setenv(caches.LIMIT, str(2.5 * len(web.files['/a.npz']) / 1e9))
    for name in 'abac':  # `b` was used longest ago
        assert_read(f'{web.url}/{name}.npz')
        for folder in cache_folder.rglob('*.npz'):
            stat = folder.parent.stat()
            os.utime(folder.parent, ns=(stat.st_atime_ns, stat.st_mtime_ns - 10**9))
    assert sorted(p.name for p in cache_folder.rglob('*.npz')) == ['a.npz', 'c.npz']


@pytest.mark.slow
@pytest.mark.fault(110)
@pytest.mark.usefixtures('one_device')
def test_a_password_is_kept_and_shown_nowhere(web, smoke_run, tmp_path, monkeypatch, capsys, repo):
    monkeypatch.setenv(URLS, '')
    assert cli.main(['convert', str(smoke_run), str(tmp_path / 'smoke.npz')]) == 0
    web.files['/a.npz'] = (tmp_path / 'smoke.npz').read_bytes()
    web.login = f'Basic {base64.b64encode(b"user:PASSWORD").decode()}'
    url = web.url.replace('://', '://user:PASSWORD@') + '/a.npz'
    hidden = web.url.replace('://', '://***@') + '/a.npz'
    config = ['--config', f'{repo}/experiments/vit/digits.py:smoke', '--workdir', f'{tmp_path}/run']

    def train(url, *flags):
        return cli.main(['train', *config, f'--config.init.from={url}', *flags])

    assert train(url, '--stop-at', '1') == 75
    monkeypatch.setenv(URLS, '')
    web.login = 'none'
    assert train(hidden, '--stop-at', '2') == 75, 'a resumed run does not read it again'
    assert cli.main(['report', f'{tmp_path}/run', '--out', f'{tmp_path}/report.html']) == 0
    assert hidden in (tmp_path / 'run' / 'config.json').read_text()
    assert cli.main(['inspect', '--checkpoint', hidden]) == 2
    assert cli.main(['inspect', '--checkpoint', url]) == 2
    shown = capsys.readouterr()
    assert mentions(shown.err, hidden, 'credentials', 'stored')
    assert 'access is denied' in shown.err
    assert 'PASSWORD' not in shown.out + shown.err
    files = [file for file in tmp_path.rglob('*') if file.is_file()]
    assert not [file for file in files if b'PASSWORD' in file.read_bytes()]
