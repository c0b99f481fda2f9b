"""Checkpoints on the Hugging Face Hub: hf://ORG/NAME, hf://ORG/NAME@REVISION, hf://ORG/NAME/FILE.

huggingface_hub parses these names, downloads to its own cache, resumes downloads and logs in; its
environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) apply. It does not verify
downloads or cached files, so each use here compares each file with a checksum: its name in the
cache or, if that is not a checksum, the sha256 of its first use, stored with the files of the
repository. A branch is recorded in the cache only after all files of a checkpoint are complete, so
that offline work finds either all of them or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import os
import pathlib
import re
import urllib.request
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax import extras
from vit_jax.errors import Unavailable, UserError
from vit_jax.storage import paths, servers

if TYPE_CHECKING:
    from huggingface_hub import HfUri

SCHEME = 'hf://'
OPEN_CLIP, OPEN_CLIP_WEIGHTS = 'open_clip_config.json', 'open_clip_model.safetensors'
CONFIGS = ('config.json', 'preprocessor_config.json', 'processor_config.json', OPEN_CLIP)
# In order of preference: SigLIP's, then Gemma's, which SigLIP 2 uses.
TOKENIZERS = ('spiece.model', 'tokenizer.model', 'tokenizer.json')
TOKENIZER_CONFIG = 'tokenizer_config.json'
BESIDE = (*CONFIGS, *TOKENIZERS, TOKENIZER_CONFIG)
WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'
PICKLES = ('.bin', '.pt', '.pth', '.pkl', '.pickle', '.ckpt')
# Including addresses of model pages in a browser; other pages are plain URLs.
_MODELS = re.compile(
    r'hf://|https://(?:huggingface\.co|hf\.co)/'
    r'(?!(?:api|buckets|collections|datasets|docs|kernels|papers|spaces)/)[\w.-]+/[\w.-]'
)
_SHARD = re.compile(r'model-\d+-of-\d+\.safetensors')
# Weights in one precision, which transformers reads as a `variant`.
_VARIANT = re.compile(r'model\.[\w-]+\.safetensors')
_CHECKSUM = re.compile('[0-9a-f]{64}|[0-9a-f]{40}')  # sha256 of LFS, SHA-1 of git
_SUMS = '.vit_jax'  # in a repository's cache: sha256 of files whose names are not checksums
_MAX_FORMATTED = 4
_MAX_NAMES = 1000  # of an organization, searched for similar names
RELEASED = pathlib.Path(__file__).with_name('released.json')


def matches(path: str) -> bool:
    """Return whether a path names a model on the Hub."""
    return _MODELS.match(path) is not None


def fetch(url: str) -> str:
    """Return the local folder or file of a checkpoint on the Hub, downloading it if not cached.

    Raises:
      UserError: if the Hub has no such checkpoint, or it cannot be downloaded: no login, no
        network, a full disk, or a wrong checksum.
    """
    with extras.needed_by(f'{url}: {SCHEME}', 'hub'):
        import huggingface_hub as hub
        from huggingface_hub import constants
    uri = parse_url(url)
    if constants.HF_HUB_OFFLINE:
        return _find_cached(uri, 'HF_HUB_OFFLINE is set')
    if not urllib.request.getproxies():
        name = _name(uri)
        try:
            servers.connect(constants.ENDPOINT, name)
        except servers.Unreachable as error:
            return _find_cached(
                uri, str(error).removeprefix(f'{name} cannot be reached: '), type(error)
            )
    with _explain_errors(uri):
        info = hub.HfApi().model_info(uri.id, revision=uri.revision, files_metadata=True)
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        files = choose([*siblings], uri)
        commit = info.sha or uri.revision
        local = [
            _download(uri, commit, name, _announced_checksum(siblings[name])) for name in files
        ]
        # Last, since it records the branch's commit.
        hub.hf_hub_download(uri.id, files[0], revision=uri.revision)
    return _checkpoint_path(local, files)


def parse_url(url: str) -> HfUri:
    """Parse a URL.

    Raises:
      UserError: if the URL does not name a model.
    """
    from huggingface_hub import errors, parse_hf_uri

    with contextlib.suppress(errors.HfUriError):
        if (uri := parse_hf_uri(url)).type == 'model':
            return uri
    raise UserError(f'{url}: write hf://ORG/NAME, hf://ORG/NAME@REVISION or hf://ORG/NAME/FILE')


def _name(uri: HfUri) -> str:
    """Format the URL as users write it."""
    return uri.to_uri().replace('models/', '', 1)


def choose(names: Sequence[str], uri: HfUri) -> list[str]:
    """Choose the files of a repository to read: configs first, weights last.

    Args:
      names: Names of all its files.
      uri: URI, whose path may name the weights, or their folder.

    Raises:
      UserError: if there are no weights in a supported format, or several files of weights.
    """
    if uri.path_in_repo in names:
        return _with_configs(names, [uri.path_in_repo])
    folder = f'{uri.path_in_repo}/' if uri.path_in_repo else ''
    names_inside = [name.removeprefix(folder) for name in names if name.startswith(folder)]
    if not names_inside and folder:
        near = _nearest(uri.path_in_repo, names) or _format_names(names)
        raise UserError(f'{_name(uri)}: the repository has no such file ({near})')
    weights = _weights(names_inside, uri)
    return _with_configs(names, [folder + name for name in weights])


def _weights(names: Sequence[str], uri: HfUri) -> list[str]:
    """Find the weights among the files of a folder."""
    if WEIGHTS in names:
        return [WEIGHTS]
    if INDEX in names:
        return [INDEX, *(name for name in names if _SHARD.fullmatch(name))]
    if variants := [name for name in names if _VARIANT.fullmatch(name)]:
        raise UserError(
            f'{_name(uri)}: has no {WEIGHTS}, only variants ({_format_names(variants)}): choose '
            f'{_name(uri)}/{variants[0]}'
        )
    for suffix in ('.safetensors', '.npz'):
        candidates = [name for name in names if name.endswith(suffix) and '/' not in name]
        if len(candidates) == 1:
            return candidates
        if candidates:
            raise UserError(
                f'{_name(uri)}: has several checkpoints ({_format_names(candidates)}): choose '
                f'{_name(uri)}/{candidates[0]}'
            )
    if candidates := [name for name in names if name.endswith(PICKLES)]:
        raise UserError(
            f'{_name(uri)}: only has pickled weights ({_format_names(candidates)}), which can run '
            f'code and are not supported; name a revision with {WEIGHTS}, such as '
            f'{SCHEME}{uri.id}@refs/pr/1'
        )
    raise UserError(f'{_name(uri)}: has no .safetensors or .npz file ({_format_names(names)})')


def _with_configs(names: Iterable[str], weights: list[str]) -> list[str]:
    folder = weights[0].rpartition('/')[0]
    tokenizer = next((name for name in TOKENIZERS if name in names), None)
    requested = (*CONFIGS, tokenizer) if tokenizer and not folder else CONFIGS
    in_folder = [f'{folder}/{name}' if folder else name for name in requested]
    return [name for name in in_folder if name in names] + weights


def _checkpoint_path(local: Sequence[str], chosen: Sequence[str]) -> str:
    """Return the folder if the weights have their usual name, else the file of weights."""
    named = {pathlib.PurePosixPath(name).name for name in chosen}
    folder = named & {WEIGHTS, INDEX}
    return str(pathlib.Path(local[-1]).parent) if folder else local[-1]


def _announced_checksum(sibling: Any) -> str:
    """Return the checksum of a file in the Hub's list, from LFS or git; empty if there is none."""
    lfs = sibling.lfs
    return (lfs.sha256 if lfs else sibling.blob_id) or ''


def _download(uri: HfUri, commit: str | None, name: str, announced: str) -> str:
    """Download a file and verify the checksum that the Hub announces."""
    import huggingface_hub as hub

    for _ in range(2):  # replace a cached copy that is damaged
        with warnings.catch_warnings():  # about a full disk, which raises an error anyway
            warnings.simplefilter('ignore')
            local = hub.hf_hub_download(uri.id, name, revision=commit)
        if _is_intact(local, uri, announced):
            return local
        for path in (os.path.realpath(local), local, _record(local, uri)):
            pathlib.Path(path).unlink(missing_ok=True)
    raise Unavailable(
        f'{_name(uri)}: the download of {name} does not match its checksum and was deleted: try '
        'again later, or see HF_ENDPOINT'
    )


def _is_intact(local: str, uri: HfUri, announced: str = '') -> bool:
    """Return whether a cached file matches its checksum.

    The checksum is the name of the cached file if it looks like one (git or LFS). For other names,
    for example in a cache without links or from a mirror with its own ETags, it is the sha256 at
    first use, which must equal the `announced` one if there is any.
    """
    blob = pathlib.Path(local).resolve()
    if _CHECKSUM.fullmatch(blob.name):
        return _has(blob, blob.name)
    record = _record(local, uri)
    if record.is_file():
        return _has(blob, record.read_text())
    if _CHECKSUM.fullmatch(announced) and not _has(blob, announced):
        return False
    with contextlib.suppress(OSError):  # a read-only cache stores nothing
        record.parent.mkdir(exist_ok=True)
        paths.write_text_atomic(record, paths.sha256(blob))
    return True


def _record(local: str, uri: HfUri) -> pathlib.Path:
    """Return the path of the sha256 of a cached file."""
    folder = _folder(uri)
    name = os.path.relpath(os.path.realpath(local), os.path.realpath(folder))
    return folder / _SUMS / f'{hashlib.sha256(name.encode()).hexdigest()[:32]}.sha256'


def _has(blob: pathlib.Path, checksum: str) -> bool:
    """Return whether a file has this sha256 or, as a git object, this SHA-1."""
    from huggingface_hub.utils import sha

    actual = paths.sha256(blob) if len(checksum) == 64 else sha.git_hash(blob.read_bytes())
    return actual == checksum


def _folder(uri: HfUri) -> pathlib.Path:
    """Return the folder of a repository in the cache."""
    from huggingface_hub import constants, file_download

    folder = file_download.repo_folder_name(repo_id=uri.id, repo_type='model')
    return pathlib.Path(constants.HF_HUB_CACHE, folder)


def _find_cached(uri: HfUri, reason: str, kind: type[UserError] = UserError) -> str:
    """Return the local folder or file of a cached checkpoint; raise `kind` if it is not cached."""
    from huggingface_hub import constants

    folder = _folder(uri)
    revision = uri.revision or constants.DEFAULT_REVISION
    ref = folder / 'refs' / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    snapshot = folder / 'snapshots' / commit
    names = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob('*') if p.is_file()]
    if not names:
        raise kind(f'{_name(uri)}: not in the cache {constants.HF_HUB_CACHE}, and {reason}')
    names_chosen = choose(names, uri)
    local = [str(snapshot / name) for name in names_chosen]
    for name, path in zip(names_chosen, local, strict=True):
        if not _is_intact(path, uri):
            raise kind(f'{_name(uri)}: {name} is damaged in the cache ({path}), and {reason}')
    return _checkpoint_path(local, names_chosen)


@contextlib.contextmanager
def _explain_errors(uri: HfUri) -> Iterator[None]:
    """Convert exceptions of huggingface_hub and its HTTP client to one-line errors."""
    from huggingface_hub import errors

    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError:
        raise UserError(
            f'{_name(uri)}: gated: accept its conditions at https://huggingface.co/{uri.id}, then '
            'log in with hf auth login, or set HF_TOKEN'
        ) from None
    except errors.RevisionNotFoundError:
        near = _nearest(uri.revision or '', _revisions(uri))
        raise UserError(f'{_name(uri)}: there is no revision {uri.revision!r}{near}') from None
    except errors.RepositoryNotFoundError:
        near = _nearest(uri.id, _repositories(uri), SCHEME)
        raise UserError(
            f'{_name(uri)}: there is no such repository{near}; if it is private, log in with '
            'hf auth login, or set HF_TOKEN'
        ) from None
    except Exception as error:
        raise _failure(uri, error) from error


def _failure(uri: HfUri, error: Exception) -> UserError:
    from huggingface_hub import constants

    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    status = getattr(getattr(cause, 'response', None), 'status_code', None)
    if status in (401, 403):
        return UserError(
            f'{_name(uri)}: access is denied ({paths.first_line(cause)}): log in with hf '
            'auth login, or set HF_TOKEN'
        )
    if status is None and isinstance(cause, OSError) and cause.errno:
        return UserError(
            f'{_name(uri)}: cannot be stored in {constants.HF_HUB_CACHE} ({cause.strerror}): free '
            'space, or set HF_HOME to another cache folder'
        )
    return Unavailable(
        f'{_name(uri)}: cannot be downloaded ({paths.first_line(cause)}); run the command again'
    )


def _revisions(uri: HfUri) -> list[str]:
    import huggingface_hub as hub

    with contextlib.suppress(Exception):
        refs = hub.HfApi().list_repo_refs(uri.id)
        return [ref.name for ref in (*refs.branches, *refs.tags)]
    return []


def _repositories(uri: HfUri) -> list[str]:
    """List the repositories of an organization, and of the table of released checkpoints."""
    import huggingface_hub as hub

    released = [
        entry.name.removeprefix(SCHEME) for entry in released_table() if matches(entry.name)
    ]

    with contextlib.suppress(Exception):
        models = hub.HfApi().list_models(author=uri.id.split('/')[0], limit=_MAX_NAMES)
        return [*released, *(model.id for model in models)]
    return released


def _nearest(name: str, names: Sequence[str], scheme: str = '') -> str:
    """Return a hint at the most similar name; empty if there is none."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f'; did you mean {scheme}{near[0]}?' if near else ''


def _format_names(names: Sequence[str]) -> str:
    more = ', ...' if len(names) > _MAX_FORMATTED else ''
    return ', '.join(sorted(names)[:_MAX_FORMATTED]) + more


@dataclasses.dataclass(frozen=True)
class Released:
    """A released checkpoint.

    Attributes:
      name: Name for `vit_jax.load`.
      model: Keywords of the model, with its name and variant; None if not listed.
      parameters: Number of parameters, rounded if `model` is None; None if unknown.
      image_size: Side in pixels; None for any size.
      trained_on: Training data, in order.
      accuracy: Published accuracy in percent; None if there is none.
      metric: Kind of accuracy; empty if there is none. 'ImageNet' is the checkpoint's top-1.
      source: URL of the page with these facts.
    """

    name: str
    model: dict[str, Any] | None
    parameters: int | None
    image_size: int | None
    trained_on: str
    accuracy: float | None
    metric: str
    source: str


@functools.cache
def released_table() -> tuple[Released, ...]:
    """Return all checkpoints of the table, grouped by source."""
    groups = json.loads(RELEASED.read_text())
    return tuple(Released(*[*row, source]) for source, rows in groups.items() for row in rows)


def nearest_released(path: str) -> str:
    """Return the released name most similar to a path; empty if none is close."""
    names = {entry.name: None for entry in released_table()}
    tail = path.rstrip('/').rpartition('/')[2].removesuffix('.npz')
    for name in names:
        stem = name.removesuffix(':img').removesuffix('.npz')
        if tail and stem.endswith(f'/{tail}'):
            return name
    requested = path.removeprefix('gs://').removeprefix('vit_models/').removesuffix('.npz')
    near = difflib.get_close_matches(requested, names, n=1, cutoff=0.7)
    return near[0] if near else ''
