"""A server on this machine that speaks the protocol of the Hugging Face Hub."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

import pytest

LARGE = ('.safetensors', '.npz', '.bin')  # kept in LFS, behind a redirect
_API = re.compile(r'/api/models/([^/]+/[^/]+)(?:/revision/([^/]+)|/(refs))?')
_FILE = re.compile(r'/([^/]+/[^/]+)/resolve/([^/]+)/(.+)')


@dataclasses.dataclass
class Hub:
    """What the server has, and how it fails.

    Attributes:
      repos: files by name, by repository and branch.
      gated: repositories that take the token.
      token: that logs in.
      cut: so many bytes of a large file are sent before the connection breaks; None for all.
      cuts: how often this still happens.
      swapped: large files arrive with other bytes than announced.
      odd: ETags are no checksums, as those of some mirrors.
      listed: the list of files has their checksums.
      requests: method and path of all requests so far.
      sent: bytes of large files that were sent.
      uploaded: large files that were received, by their sha256.
      card: text of the last model card that was checked.
    """

    repos: dict[str, dict[str, dict[str, bytes]]] = dataclasses.field(default_factory=dict)
    gated: set[str] = dataclasses.field(default_factory=set)
    token: str = 'hf_right'
    cut: int | None = None
    cuts: int = 1
    swapped: bool = False
    odd: bool = False
    listed: bool = False
    requests: list[str] = dataclasses.field(default_factory=list)
    sent: int = 0
    uploaded: dict[str, bytes] = dataclasses.field(default_factory=dict)
    card: str = ''
    url: str = ''

    def add(self, repo: str, files: dict[str, bytes], branch: str = 'main') -> str:
        """Put files there; returns the commit."""
        self.repos.setdefault(repo, {})[branch] = dict(files)
        return commit(files)

    def downloads(self) -> list[str]:
        """Names of large files that were sent."""
        return [r.rpartition('/')[2] for r in self.requests if r.startswith('GET /cdn/')]


def commit(files: dict[str, bytes]) -> str:
    """The commit that holds these files."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


@contextlib.contextmanager
def serve(hub: Hub, cache) -> Iterator[Hub]:
    """Serves on this machine; huggingface_hub asks there, and keeps what it gets in `cache`."""
    constants = pytest.importorskip('huggingface_hub.constants')
    handler = type('Handler', (_Handler,), {'hub': hub})
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f'http://127.0.0.1:{server.server_port}'
    pattern = '/{repo_id}/resolve/{revision}/{filename}'
    values = {
        'ENDPOINT': hub.url,
        'HUGGINGFACE_CO_URL_TEMPLATE': hub.url + pattern,
        'HF_HUB_CACHE': str(cache),
        'HF_HUB_OFFLINE': False,
        'HF_HUB_DISABLE_XET': True,  # uploads by LFS
        'HF_TOKEN_PATH': f'{cache}/token',
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(constants, name, value)
        patch.delenv('HF_TOKEN', raising=False)
        try:
            yield hub
        finally:
            server.shutdown()
            server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = 'HTTP/1.1'

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.requests.append(f'{self.command} {path}')
        if path == '/api/models':
            return self._json([{'id': name} for name in self.hub.repos])
        if path.startswith('/cdn/'):
            return self._blob(path.split('/')[2])
        if match := _API.fullmatch(path):
            return self._api(*match.groups())
        if match := _FILE.fullmatch(path):
            return self._file(*match.groups())
        return self._fail(404, '')

    def do_PUT(self):
        content = self._body()
        self.hub.uploaded[hashlib.sha256(content).hexdigest()] = content
        self._send(200, b'', {})

    def do_POST(self):
        path, body = urllib.parse.urlsplit(self.path).path, self._body()
        self.hub.requests.append(f'POST {path}')
        if self.headers.get('Authorization') != f'Bearer {self.hub.token}':
            return self._fail(401, '')
        if path == '/api/validate-yaml':
            self.hub.card = json.loads(body)['content']
            return self._json({'warnings': [], 'errors': []})
        if path == '/api/repos/create':
            asked = json.loads(body)
            name = f'{asked["organization"]}/{asked["name"]}'
            if asked['organization'] == 'others':
                return self._fail(403, '')
            self.hub.repos.setdefault(name, {'main': {}})
            return self._json({'url': f'{self.hub.url}/{name}'})
        if path.endswith('/info/lfs/objects/batch'):
            objects = json.loads(body)['objects']
            actions = {'actions': {'upload': {'href': f'{self.hub.url}/put'}}}
            return self._json({'transfer': 'basic', 'objects': [o | actions for o in objects]})
        repo = '/'.join(path.split('/')[3:5])
        if '/preupload/' in path:
            names = [file['path'] for file in json.loads(body)['files']]
            modes = {True: 'lfs', False: 'regular'}
            return self._json(
                {
                    'files': [
                        {'path': n, 'uploadMode': modes[n.endswith(LARGE)], 'shouldIgnore': False}
                        for n in names
                    ]
                }
            )
        return self._commit(repo, body)

    def _commit(self, repo, body):
        files = self.hub.repos[repo]['main']
        for line in map(json.loads, body.splitlines()):
            value = line['value']
            if line['key'] == 'file':
                files[value['path']] = base64.b64decode(value['content'])
            if line['key'] == 'lfsFile':
                files[value['path']] = self.hub.uploaded[value['oid']]
        oid = commit(files)
        url = f'{self.hub.url}/{repo}/commit/{oid}'
        return self._json({'success': True, 'commitOid': oid, 'commitUrl': url})

    def _body(self):
        if self.headers.get('Transfer-Encoding') == 'chunked':
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b''.join(parts)
        return self.rfile.read(int(self.headers.get('Content-Length') or 0))

    def log_message(self, *args):
        """Silent."""

    def _files(self, repo, revision):
        branches = self.hub.repos.get(repo)
        if branches is None:
            # Without a login nobody is told whether it exists.
            self._fail(401, 'RepoNotFound')
            return None
        for branch, files in branches.items():
            if revision in (branch, commit(files)):
                return files
        self._fail(404, 'RevisionNotFound')
        return None

    def _api(self, repo, revision, refs):
        if (files := self._files(repo, revision or 'main')) is None:
            return None
        if refs:
            heads = self.hub.repos[repo].items()
            named = [
                {'name': b, 'ref': f'refs/heads/{b}', 'targetCommit': commit(f)} for b, f in heads
            ]
            return self._json({'branches': named, 'tags': [], 'converts': []})
        siblings = [{'rfilename': name, **self._sums(name, c)} for name, c in files.items()]
        return self._json({'id': repo, 'sha': commit(files), 'siblings': siblings})

    def _sums(self, name, content):
        if not self.hub.listed:
            return {}
        if not name.endswith(LARGE):
            git = hashlib.sha1(f'blob {len(content)}\0'.encode() + content).hexdigest()
            return {'blobId': git, 'size': len(content)}
        digest = hashlib.sha256(content).hexdigest()
        return {'lfs': {'size': len(content), 'sha256': digest, 'pointerSize': 100}}

    def _file(self, repo, revision, name):
        if (files := self._files(repo, revision)) is None:
            return None
        right = self.headers.get('Authorization') == f'Bearer {self.hub.token}'
        if repo in self.hub.gated and not right:
            return self._fail(401, 'GatedRepo')
        headers = {'X-Repo-Commit': commit(files)}
        if name not in files:
            return self._fail(404, 'EntryNotFound', headers)
        content = files[name]
        if not name.endswith(LARGE):
            etag = hashlib.sha1(f'blob {len(content)}\0'.encode() + content).hexdigest()
            etag = f'{etag[:32]}-1' if self.hub.odd else etag
            return self._send(200, content, headers | {'ETag': f'"{etag}"'})
        digest = hashlib.sha256(content).hexdigest()
        etag = f'{digest[:32]}-5' if self.hub.odd else digest
        linked = {'X-Linked-Etag': f'"{etag}"', 'X-Linked-Size': str(len(content))}
        other = self.hub.url.replace('127.0.0.1', 'localhost')  # another host, as the real one's
        location = {'Location': f'{other}/cdn/{digest}/{name}'}
        return self._send(302, b'', headers | linked | location)

    def _blob(self, digest):
        everything = (
            c for branches in self.hub.repos.values() for f in branches.values() for c in f.values()
        )
        content = next(c for c in everything if hashlib.sha256(c).hexdigest() == digest)
        if self.hub.swapped:
            content = bytes(255 - byte for byte in content)
        start, headers = 0, {'ETag': f'"{digest}"', 'Accept-Ranges': 'bytes'}
        if asked := self.headers.get('Range'):
            start = int(re.match(r'bytes=(\d+)-', asked)[1])
            headers['Content-Range'] = f'bytes {start}-{len(content) - 1}/{len(content)}'
        cut = None
        if self.hub.cut is not None and self.hub.cuts > 0 and self.command == 'GET':
            self.hub.cuts -= 1
            cut = self.hub.cut
        if self.command == 'GET':
            self.hub.sent += len(content[start:][:cut])
        return self._send(206 if start else 200, content[start:], headers, cut)

    def _fail(self, status, code, headers=None):
        self._send(status, b'{}', {'X-Error-Code': code, **(headers or {})})

    def _json(self, content):
        self._send(200, json.dumps(content).encode(), {'Content-Type': 'application/json'})

    def _send(self, status, body, headers, cut=None):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True
