"""What checks annotations in the tests: a module, as jaxtyping asks for a dotted name."""

from beartype import BeartypeConf, beartype

# As for a static checker, an int may stand where a float is asked for.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
