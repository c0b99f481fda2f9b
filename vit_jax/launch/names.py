"""Names that launchers write into shell commands and manifests, which could read them otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from vit_jax.errors import UserError

VARIABLE = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')
PLACE = re.compile(r'[a-z0-9-]*')
SHORT = re.compile(r'[a-z]([-a-z0-9]{0,38}[a-z0-9])?')
FOLDER = re.compile(r'(/(?!\.\.?(/|$))[-_.A-Za-z0-9]+)+/?')


def check_variables(launcher: str, names: Iterable[str]) -> None:
    """Raise UserError unless all are names of environment variables."""
    for name in names:
        if not VARIABLE.fullmatch(name):
            raise UserError(
                f'launch {launcher}: --env {name!r}: must be NAME=VALUE, and NAME letters, digits '
                'and _, no digit first'
            )


def check_places(launcher: str, places: Mapping[str, str]) -> None:
    """Raise UserError unless all values, by their flags, are names of regions and the like."""
    for flag, place in places.items():
        if not PLACE.fullmatch(place):
            raise UserError(f'launch {launcher}: {flag} {place!r}: must be a name, as us-central1')


def check_short(launcher: str, flag: str, name: str) -> None:
    """Raise UserError unless Google Cloud and Kubernetes take it as the name of a resource."""
    if not SHORT.fullmatch(name):
        raise UserError(
            f'launch {launcher}: {flag} {name!r}: must be at most 40 lower-case letters, digits '
            'and -, and begin with a letter'
        )


def check_mounts(launcher: str, mounts: Mapping[str, str], schemes: Iterable[str]) -> None:
    """Raise UserError unless all are buckets of these schemes, by folders."""
    bucket = re.compile(rf'({"|".join(schemes)})://[a-z0-9][-_.a-z0-9]*/?')
    for path, source in mounts.items():
        if not (FOLDER.fullmatch(path) and bucket.fullmatch(source)):
            raise UserError(
                f'launch {launcher}: --mount {f"{path}={source}"!r}: must be /FOLDER=gs://BUCKET, '
                'of a whole bucket, in lower case; letters, digits, -, _ and . may stand in FOLDER'
            )


def check_data(launcher: str, env: Mapping[str, str], hint: str) -> None:
    """Raise UserError, with a hint, if TFDS would look for data in a bucket."""
    if '://' in (folder := env.get('TFDS_DATA_DIR', '')):
        raise UserError(
            f'launch {launcher}: TFDS_DATA_DIR={folder}: data are read from folders; {hint}'
        )
