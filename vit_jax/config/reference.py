"""Every key of a config: its type and default from a signature, its meaning from a docstring."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import defaults, docstrings, schema, values
from vit_jax.errors import modules, resolve
from vit_jax.optim import make as optim
from vit_jax.signatures import Parameters, are_durations, is_duration, keyword_only

HEAD = """# Config keys

`make docs` generates this page from the constructors' signatures and docstrings;
`python -m vit_jax list keys` prints it. To see the keys of one config, with its values and the
keys of its optimizer, run

    python -m vit_jax train --config experiments/vit/digits.py --help-config

Durations are strings: `'300 steps'`, `'30 epochs'`, `'1e6 examples'` or `'5%'` of the run.
"""
NAMED = (
    ('config.model, name=', 'vit_jax.models', 'Model'),
    ('config.task, name=', 'vit_jax.tasks', 'Task'),
    ('config.evals.NAME, evaluator=', 'vit_jax.evaluators', 'Evaluator'),
)


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a section.

    Attributes:
      name: in its section.
      type: of its values, in words.
      default: as Python writes it; empty if it has to be given.
      text: its description in the constructor's docstring.
      value: in a config, as Python writes it; empty without a config.
    """

    name: str
    type: str
    default: str
    text: str
    value: str = ''

    @property
    def line(self) -> str:
        """The first sentence of `text`."""
        return docstrings.sentence(self.text)


def of_config(config: ConfigDict) -> dict[str, list[Key]]:
    """The keys that each section of a config has or may have, {place: keys}.

    Args:
      config: checked. A place is for example 'config.optim.schedule'.
    """
    found: dict[str, list[Key]] = {}
    for section in _sections(config):
        known = schema.parameters(config, section)
        values_only = {name: p for name, p in known.items() if values.kinds(p) != (dict,)}
        given = defaults.at(config, section) if section else config
        readers = schema.readers(config, section)
        found[f'config.{section}'.rstrip('.')] = keys(values_only, readers, given)
    return found


def of_package() -> dict[str, list[Key]]:
    """The keys of everything in this package that a config may name, {heading: keys}.

    Optimizers of Optax are left out: their keys are those of the version that is installed.
    """
    found: dict[str, list[Key]] = {}
    for section in schema.SECTIONS:
        reader = schema.constructor(section)
        found[f'config.{section}'.rstrip('.')] = keys(keyword_only(reader), [reader])
    entry = keys(keyword_only(schema.Entry), [schema.Entry])
    found['config.evals.NAME, beside the keys of config.data'] = entry
    for name, function in optim.OWN.items():
        found[f'config.optim, name={name}'] = keys(optim.options(name), [function])
    for heading, package, attribute in NAMED:
        for name in modules(package):
            cls = resolve(package, name, attribute)
            found[f'{heading}{name}'] = keys(schema.keys_of(cls), [cls])
    return {heading: listed for heading, listed in found.items() if listed}


def keys(known: Parameters, readers: Iterable[Callable], given: Any = None) -> list[Key]:
    """The keys of a section.

    Args:
      known: its parameters.
      readers: the constructors whose docstrings describe them.
      given: the section of a config, if there is one.
    """
    texts: dict[str, str] = {}
    for reader in readers:
        texts |= {schema.key_of(k): text for k, text in docstrings.of_parameters(reader).items()}
    found = []
    for name, p in ((schema.key_of(name), p) for name, p in known.items()):
        default = _default(p)
        value = '' if given is None else repr(given[name]) if name in given else default
        found.append(Key(name, _type(p), default, texts.get(name, ''), value))
    return found


def markdown(sections: Mapping[str, list[Key]]) -> str:
    """A page that lists the keys of sections, such as those of `of_package`."""
    lines = [HEAD]
    lines += [*(f'- [{heading}](#{_anchor(heading)})' for heading in sections), '']
    for heading, listed in sections.items():
        lines += [f'## {heading}', '', '| key | type | default | meaning |', '|---|---|---|---|']
        for key in listed:
            default = f'`{key.default}`' if key.default else 'required'
            cells = (f'`{key.name}`', key.type, default, key.text)
            lines.append(f'| {" | ".join(cell.replace("|", "&#124;") for cell in cells)} |')
        lines.append('')
    return '\n'.join(lines)


def _anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading."""
    return re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ''
    if values.kinds(parameter) == (dict,):  # made anew by a dataclass, where it is no mapping
        return repr(dict(parameter.default) if isinstance(parameter.default, Mapping) else {})
    return repr(parameter.default)


def _type(parameter: inspect.Parameter) -> str:
    if is_duration(parameter.annotation):
        return 'duration or None' if parameter.default is None else 'duration'
    if are_durations(parameter.annotation):
        return 'tuple of durations'
    return values.names(values.kinds(parameter)) or 'any'


def _sections(config: ConfigDict) -> Iterator[str]:
    """The config itself, '', and its groups in the order of `schema.Config`."""
    yield ''
    for name, parameter in keyword_only(schema.Config).items():
        if name == 'evals':
            yield from (f'evals.{entry}' for entry in config.evals)
        elif values.kinds(parameter) == (dict,):
            yield name
        yield from schema.within(name)
