"""The type checker of annotations in tests; jaxtyping requires the dotted name of a module."""

from beartype import BeartypeConf, beartype

# As for a static checker, an int may stand where a float is asked for.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
