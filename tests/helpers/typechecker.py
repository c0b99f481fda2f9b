"""The type checker of annotations in tests; jaxtyping requires the dotted name of a module."""

import contextlib
from collections.abc import Iterator

from beartype import BeartypeConf, beartype
from jaxtyping import config

# As for a static checker, an int may stand where a float is asked for.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Check no annotations, as outside of tests: callers may give arrays of NumPy."""
    config.update('jaxtyping_disable', True)
    try:
        yield
    finally:
        config.update('jaxtyping_disable', False)
