"""Checkpoints on the Hugging Face Hub: hf://ORG/NAME, hf://ORG/NAME@REVISION, hf://ORG/NAME/FILE.

huggingface_hub downloads them into its own cache, resumes, and knows the token; its environment
variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) apply. Every file is compared with a
checksum whenever it is used: that by which the Hub names it, or, where a name is none, the sha256
that it had when it was first used, which is kept beside the repository's files. A branch is only
recorded in the cache once all files of a checkpoint are there, so that offline work finds either
all of them or none.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import os
import pathlib
import re
import urllib.request
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from vit_jax import extras
from vit_jax.errors import UserError
from vit_jax.interop import released
from vit_jax.storage import paths, servers

SCHEME = 'hf://'
CONFIGS = ('config.json', 'preprocessor_config.json', 'processor_config.json')
# The first one that there is: of SigLIP, and of Gemma, which SigLIP 2 takes.
TOKENIZERS = ('spiece.model', 'tokenizer.model', 'tokenizer.json')
TOKENIZER_CONFIG = 'tokenizer_config.json'
WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'
PICKLES = ('.bin', '.pt', '.pth', '.pkl', '.pickle', '.ckpt')
_REVISION = r'refs/\w+/[\w.-]+|[^/@:]+'
_URL = re.compile(rf'hf://([\w.-]+/[\w.-]+)(?:@({_REVISION}))?(?:/(.+?))?/?')
# Addresses of pages, as browsers show them.
_PAGE = re.compile(
    r'https://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)'
    rf'(?:/(?:tree|blob|resolve)/({_REVISION})(?:/([^?]+?))?)?/?(?:\?.*)?'
)
_SHARD = re.compile(r'model-\d+-of-\d+\.safetensors')
_VARIANT = re.compile(
    r'model\.[\w-]+\.safetensors'
)  # of one precision, which transformers asks for
_CHECKSUM = re.compile('[0-9a-f]{64}|[0-9a-f]{40}')  # sha256 of LFS, SHA-1 of git
_SUMS = '.vit_jax'  # in the cache of a repository: sha256 of files whose names are no checksums
_LISTED = 4
_MOST_NAMES = 1000  # of an organization, to find the nearest


class Place(NamedTuple):
    """A checkpoint on the Hub.

    Attributes:
      repo: ORG/NAME.
      revision: a branch, tag or commit.
      file: of the repository, or one of its folders; empty for all of it.
    """

    repo: str
    revision: str
    file: str

    def __str__(self) -> str:
        revision = '' if self.revision == 'main' else f'@{self.revision}'
        return f'{SCHEME}{self.repo}{revision}{"/" * bool(self.file)}{self.file}'


def matches(path: str) -> bool:
    """Whether a path is on the Hub."""
    return path.startswith(SCHEME) or _PAGE.fullmatch(path) is not None


def fetch(url: str) -> str:
    """The local folder or file of a checkpoint on the Hub, downloaded unless the cache has it.

    Raises:
      UserError: if the Hub has no such checkpoint, or it cannot be had: without a login, without
        network or room on the disk, or because its content is not what the Hub announces.
    """
    place = parse(url)
    with extras.needed_by(f'{place}: {SCHEME}', 'hub'):
        import huggingface_hub as hub
        from huggingface_hub import constants
    if constants.HF_HUB_OFFLINE:
        return _cached(place, 'HF_HUB_OFFLINE is set')
    if not urllib.request.getproxies():
        try:
            servers.connect(constants.ENDPOINT, str(place))
        except UserError as error:
            return _cached(place, str(error).removeprefix(f'{place} cannot be reached: '))
    with _explained(place):
        info = hub.HfApi().model_info(place.repo, revision=place.revision, files_metadata=True)
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        chosen = choose([*siblings], place)
        get = functools.partial(_download, place, info.sha or place.revision)
        local = [get(name, _announced(siblings[name])) for name in chosen]
        # Last, since it records that the branch is at this commit.
        hub.hf_hub_download(place.repo, chosen[0], revision=place.revision)
    return _found(local, chosen)


def parse(url: str) -> Place:
    """The parts of a URL.

    Raises:
      UserError: if it names no repository.
    """
    if (match := _URL.fullmatch(url) or _PAGE.fullmatch(url)) is None:
        raise UserError(f'{url}: write hf://ORG/NAME, hf://ORG/NAME@REVISION or hf://ORG/NAME/FILE')
    repo, revision, file = match.groups()
    return Place(repo, revision or 'main', file or '')


def choose(names: Sequence[str], place: Place) -> list[str]:
    """The files of a repository to read: configs first, weights last.

    Args:
      names: of all its files.
      place: its `file` may name the weights, or the folder that holds them.

    Raises:
      UserError: if there are no weights that are read, or several.
    """
    if place.file in names:
        return _with_configs(names, [place.file])
    folder = f'{place.file}/' if place.file else ''
    inside = [name.removeprefix(folder) for name in names if name.startswith(folder)]
    if not inside and folder:
        near = _nearest(place.file, names) or _some(names)
        raise UserError(f'{place}: there is no such file in the repository ({near})')
    weights = _weights(inside, place)
    return _with_configs(names, [folder + name for name in weights])


def _weights(names: Sequence[str], place: Place) -> list[str]:
    """The weights among the files of a folder."""
    if WEIGHTS in names:
        return [WEIGHTS]
    if INDEX in names:
        return [INDEX, *(name for name in names if _SHARD.fullmatch(name))]
    if variants := [name for name in names if _VARIANT.fullmatch(name)]:
        raise UserError(
            f'{place}: has no {WEIGHTS}, only variants ({_some(variants)}): name one, as '
            f'{place}/{variants[0]}'
        )
    for suffix in ('.safetensors', '.npz'):
        found = [name for name in names if name.endswith(suffix) and '/' not in name]
        if len(found) == 1:
            return found
        if found:
            raise UserError(
                f'{place}: holds several checkpoints ({_some(found)}): name one, as '
                f'{place}/{found[0]}'
            )
    if found := [name for name in names if name.endswith(PICKLES)]:
        raise UserError(
            f'{place}: has only pickled weights ({_some(found)}), which can run code and are not '
            f'read; name a revision with {WEIGHTS}, as {SCHEME}{place.repo}@refs/pr/1'
        )
    raise UserError(f'{place}: holds no .safetensors or .npz file ({_some(names)})')


def _with_configs(names: Iterable[str], weights: list[str]) -> list[str]:
    folder = weights[0].rpartition('/')[0]
    tokenizer = next((name for name in TOKENIZERS if name in names), None)
    wanted = (*CONFIGS, tokenizer) if tokenizer and not folder else CONFIGS
    beside = [f'{folder}/{name}' if folder else name for name in wanted]
    return [name for name in beside if name in names] + weights


def _found(local: Sequence[str], chosen: Sequence[str]) -> str:
    """The folder of weights under their usual name; else the file of weights itself."""
    named = {pathlib.PurePosixPath(name).name for name in chosen}
    folder = named & {WEIGHTS, INDEX}
    return str(pathlib.Path(local[-1]).parent) if folder else local[-1]


def _announced(sibling: Any) -> str:
    """The checksum of a file in the Hub's list, of its LFS or of git; empty if there is none."""
    lfs = sibling.lfs
    return (lfs.sha256 if lfs else sibling.blob_id) or ''


def _download(place: Place, commit: str, name: str, announced: str) -> str:
    """The local copy of a file, with the content that the Hub announces."""
    import huggingface_hub as hub

    for _ in range(2):  # a copy that was damaged in the cache is downloaded anew
        with warnings.catch_warnings():  # of a full disk, which is an error of one line
            warnings.simplefilter('ignore')
            local = hub.hf_hub_download(place.repo, name, revision=commit)
        if _is_whole(local, place, announced):
            return local
        for path in (os.path.realpath(local), local, _record(local, place)):
            pathlib.Path(path).unlink(missing_ok=True)
    raise UserError(
        f'{place}: {name} arrives with another content than its checksum says; nothing is kept: '
        'try again later, or see HF_ENDPOINT'
    )


def _is_whole(local: str, place: Place, announced: str = '') -> bool:
    """Whether a file of the cache has its checksum.

    That is its name there, of git or of its LFS, if it has the form of one. For others, as in a
    cache without links or from a mirror with ETags of its own, it is the sha256 of the first use,
    which has to be the `announced` one if there is any.
    """
    blob = pathlib.Path(local).resolve()
    if _CHECKSUM.fullmatch(blob.name):
        return _has(blob, blob.name)
    record = _record(local, place)
    if record.is_file():
        return _has(blob, record.read_text())
    if _CHECKSUM.fullmatch(announced) and not _has(blob, announced):
        return False
    with contextlib.suppress(OSError):  # in a cache that is only read, nothing is kept
        record.parent.mkdir(exist_ok=True)
        with blob.open('rb') as file:
            paths.write_text_atomic(record, hashlib.file_digest(file, 'sha256').hexdigest())
    return True


def _record(local: str, place: Place) -> pathlib.Path:
    """The place of the sha256 of a file in the cache."""
    folder = _folder(place)
    name = os.path.relpath(os.path.realpath(local), os.path.realpath(folder))
    return folder / _SUMS / f'{hashlib.sha256(name.encode()).hexdigest()[:32]}.sha256'


def _has(blob: pathlib.Path, checksum: str) -> bool:
    """Whether a file has this sha256, or as an object of git this SHA-1."""
    if len(checksum) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f'blob {blob.stat().st_size}\0'.encode(), usedforsecurity=False)
    with blob.open('rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == checksum


def _folder(place: Place) -> pathlib.Path:
    """The folder of a repository in the cache."""
    from huggingface_hub import constants

    return pathlib.Path(constants.HF_HUB_CACHE, f'models--{place.repo.replace("/", "--")}')


def _cached(place: Place, reason: str) -> str:
    """A description of what is cached of a checkpoint."""
    from huggingface_hub import constants

    folder = _folder(place)
    kept = folder / 'refs' / place.revision
    commit = kept.read_text().strip() if kept.is_file() else place.revision
    snapshot = folder / 'snapshots' / commit
    names = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob('*') if p.is_file()]
    if not names:
        raise UserError(f'{place}: not in the cache {constants.HF_HUB_CACHE}, and {reason}')
    chosen = choose(names, place)
    local = [str(snapshot / name) for name in chosen]
    for name, path in zip(chosen, local, strict=True):
        if not _is_whole(path, place):
            raise UserError(f'{place}: {name} is damaged in the cache ({path}), and {reason}')
    return _found(local, chosen)


@contextlib.contextmanager
def _explained(place: Place) -> Iterator[None]:
    """Turn exceptions of huggingface_hub and its HTTP client into one line."""
    from huggingface_hub import errors

    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError:
        raise UserError(
            f'{place}: gated: accept its conditions at https://huggingface.co/{place.repo}, then '
            'log in by the command hf auth login, or set HF_TOKEN'
        ) from None
    except errors.RevisionNotFoundError:
        near = _nearest(place.revision, _revisions(place))
        raise UserError(f'{place}: there is no revision {place.revision!r}{near}') from None
    except errors.RepositoryNotFoundError:
        near = _nearest(place.repo, _repositories(place), SCHEME)
        raise UserError(
            f'{place}: there is no such repository{near}; if it is private, log in by the command '
            'hf auth login, or set HF_TOKEN'
        ) from None
    except Exception as error:
        raise _failure(place, error) from error


def _failure(place: Place, error: Exception) -> UserError:
    from huggingface_hub import constants

    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    status = getattr(getattr(cause, 'response', None), 'status_code', None)
    if status in (401, 403):
        return UserError(
            f'{place}: access is denied ({paths.why(cause)}): log in by the command hf auth login, '
            'or set HF_TOKEN'
        )
    if status is None and isinstance(cause, OSError) and cause.errno:
        return UserError(
            f'{place}: cannot be kept in {constants.HF_HUB_CACHE} ({cause.strerror}): free space, '
            'or name another cache folder by HF_HOME'
        )
    return UserError(
        f'{place}: cannot be downloaded ({paths.why(cause)}); the same command tries again'
    )


def _revisions(place: Place) -> list[str]:
    import huggingface_hub as hub

    with contextlib.suppress(Exception):
        refs = hub.HfApi().list_repo_refs(place.repo)
        return [ref.name for ref in (*refs.branches, *refs.tags)]
    return []


def _repositories(place: Place) -> list[str]:
    """The repositories of an organization, and those of the table of released checkpoints."""
    import huggingface_hub as hub

    known = [one.name.removeprefix(SCHEME) for one in released.table() if matches(one.name)]

    with contextlib.suppress(Exception):
        found = hub.HfApi().list_models(author=place.repo.split('/')[0], limit=_MOST_NAMES)
        return [*known, *(model.id for model in found)]
    return known


def _nearest(name: str, names: Sequence[str], scheme: str = '') -> str:
    """A hint at the name most like this one, else empty."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f'; did you mean {scheme}{near[0]}?' if near else ''


def _some(names: Sequence[str]) -> str:
    more = ', ...' if len(names) > _LISTED else ''
    return ', '.join(sorted(names)[:_LISTED]) + more
