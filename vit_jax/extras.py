"""Optional dependencies: the extras of this package, and what needs them.

A module that a config can name, such as an evaluator, declares the extra that it needs:
`EXTRA = 'detection'`. So it is known on machines where the extra is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterable, Iterator

from vit_jax.errors import UserError

# A package of each extra that a command can need.
PACKAGES = {
    'beam': 'apache_beam',
    'detection': 'pycocotools',
    'gcs': 'gcsfs',
    'hub': 'huggingface_hub',
    'mlflow': 'mlflow',
    'postgres': 'psycopg',
    's3': 's3fs',
    'sweep': 'optuna',
    'translate': 'sacrebleu',
    'wandb': 'wandb',
}
# Those that no command needs but for the modules its config names.
OF_CONFIGS = {'detection', 'mlflow', 'translate', 'wandb'}
SCHEMES = {
    'gs': 'gcs',
    'hf': 'hub',
    's3': 's3',
    'postgresql': 'postgres',
    'postgresql+psycopg': 'postgres',
}
_URL = re.compile(rf'\b({"|".join(map(re.escape, SCHEMES))})://')


def missing(what: str, extra: str, package: str = '') -> UserError:
    """The error of something that needs an extra; `package` is the one of it that is missing."""
    return UserError(f"{what} needs {package or PACKAGES[extra]}: pip install 'vit_jax[{extra}]'")


@contextlib.contextmanager
def needed_by(what: str, extra: str) -> Iterator[None]:
    """Turn an ImportError in the block into a UserError that names the extra."""
    try:
        yield
    except ImportError as error:
        raise missing(what, extra) from error


def is_installed(extra: str) -> bool:
    """Whether the package of an extra can be imported; nothing is."""
    return importlib.util.find_spec(PACKAGES[extra]) is not None


def of_words(words: Iterable[str]) -> set[str]:
    """The extras that paths or flags need by the schemes of URLs, such as `--workdir=gs://a/b`."""
    return {SCHEMES[scheme] for word in words for scheme in _URL.findall(word)}
