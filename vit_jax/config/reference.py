"""Reference of config keys, from their declarations."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import objects, schema
from vit_jax.config.run import Data, Evaluation, Model, Optim, Task
from vit_jax.config.schema import are_durations, is_duration
from vit_jax.errors import modules, resolve
from vit_jax.optim import make as optim
from vit_jax.signatures import Parameters

HEAD = """# Config keys

`make docs` generates this page from `vit_jax/config/run.py` and the classes that a config names;
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
NAMED_SECTIONS = (Model, Task, Optim)
_DOC_SECTIONS = ('Args:', 'Attributes:')
_DOC_ENTRY = re.compile(r'([*\w, ]+?)(?: \([^)]*\))?:(?:\s+(.*))?')


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a section.

    Attributes:
      name: Name in its section.
      type: Types of its values, in words.
      default: Default in Python syntax; empty if the key is required.
      text: Description.
      value: Value in a config, in Python syntax; empty without a config.
    """

    name: str
    type: str
    default: str
    text: str
    value: str = ''

    @property
    def line(self) -> str:
        """First sentence of `text`."""
        return sentence(self.text)


def config_keys(config: ConfigDict) -> dict[str, list[Key]]:
    """List the valid keys of each section of a config, {'config.optim.schedule': keys}.

    Args:
      config: May lack values that a run needs, such as `data.source`.

    Raises:
      UserError: for an unknown model, task, optimizer or evaluator.
    """
    sections: dict[str, list[Key]] = {}
    for path in schema.section_paths(config):
        cls, group = schema.section_class(path), schema.find_section(config, path)
        is_open = cls in NAMED_SECTIONS and 'name' not in group
        declared = schema.fields(cls) if is_open else schema.parameters(config, path)
        values = {
            name: p
            for name, p in declared.items()
            if schema.accepted_types(p) != (dict,) or schema.is_options(p.default)
        }
        sections[f'config.{path}'.rstrip('.')] = keys(values, _texts(cls, group), group)
    return sections


def package_keys() -> dict[str, list[Key]]:
    """Return the keys of everything in this package that a config may name, {heading: keys}.

    Optax's optimizers are left out, since their keys depend on the installed version.
    """
    sections: dict[str, list[Key]] = {}
    for path in schema.section_paths({}):
        cls = schema.section_class(path)
        sections[f'config.{path}'.rstrip('.')] = keys(schema.fields(cls), field_docs(cls))
    entry = {k: p for k, p in schema.fields(Evaluation).items() if k not in schema.fields(Data)}
    heading = 'config.evals.NAME, beside the keys of config.data'
    sections[heading] = keys(entry, field_docs(Evaluation))
    for name, function in optim.OWN.items():
        sections[f'config.optim, name={name}'] = keys(optim.options(name), parameter_docs(function))
    for heading, package, attribute in NAMED:
        for name in modules(package):
            cls = resolve(package, name, attribute)
            sections[f'{heading}{name}'] = keys(schema.class_keys(cls), parameter_docs(cls))
    return {heading: listed for heading, listed in sections.items() if listed}


def _texts(cls: type, group: Mapping[str, Any]) -> dict[str, str]:
    """Return the descriptions of the keys of a section, and of what it names."""
    name = group.get('evaluator' if cls is Evaluation else 'name')
    if not name or cls not in (Evaluation, *NAMED_SECTIONS):
        return field_docs(cls)
    find: dict[type, Callable] = {
        Model: objects.model_class,
        Task: objects.task_class,
        Optim: optim.factory,
    }
    named = find.get(cls, objects.evaluator_class)(name)
    return parameter_docs(named) | field_docs(cls)


def keys(
    declared: Parameters, texts: Mapping[str, str], group: Mapping[str, Any] | None = None
) -> list[Key]:
    """Return the keys of a section.

    Args:
      declared: Its parameters.
      texts: Their descriptions.
      group: The section of a config, if any.
    """
    rows = []
    for name, p in declared.items():
        if schema.is_options(p.default):
            inner = None if group is None else group.get(name, {})
            nested = keys(schema.group_keys(declared, name), parameter_docs(type(p.default)), inner)
            rows += [dataclasses.replace(key, name=f'{name}.{key.name}') for key in nested]
            continue
        default = _default(p)
        value = '' if group is None else repr(group[name]) if name in group else default
        rows.append(Key(name, _type(p), default, texts.get(name, ''), value))
    return rows


def markdown(sections: Mapping[str, list[Key]]) -> str:
    """Return a page that lists the keys of sections, as returned by `package_keys`."""
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
    """Return the fragment that GitHub gives a heading."""
    return re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ''
    return '{}' if schema.accepted_types(parameter) == (dict,) else repr(parameter.default)


def _type(parameter: inspect.Parameter) -> str:
    if is_duration(parameter.annotation):
        return 'duration or None' if parameter.default is None else 'duration'
    if are_durations(parameter.annotation):
        return 'tuple of durations'
    return schema.type_names(schema.accepted_types(parameter)) or 'any'


def field_docs(cls: type) -> dict[str, str]:
    """Return the comment of each field of a dataclass in `run`, by its key.

    It stands behind the field on its line, or above it.
    """
    texts: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        lines = inspect.getsource(base).splitlines()
        for node in ast.parse(inspect.cleandoc('\n'.join(lines))).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                texts[node.target.id] = _comment(lines, node)
    return {key: texts[p.name] for key, p in schema.fields(cls).items()}


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    above = itertools.takewhile(
        lambda line: line.startswith('#'), (line.strip() for line in lines[node.lineno - 2 :: -1])
    )
    behind = lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :].strip()
    texts = [*reversed([*above]), behind]
    return ' '.join(text.removeprefix('#').strip() for text in texts).strip()


def parameter_docs(constructor: Callable) -> dict[str, str]:
    """Return the description of each parameter of a function or class, as one paragraph.

    A class inherits the descriptions of its bases.

    Args:
      constructor: Its docstring describes the parameters as `name: text` or `one, two: text`.
    """
    classes = inspect.getmro(constructor) if inspect.isclass(constructor) else (constructor,)
    texts: dict[str, str] = {}
    for base in reversed(classes):
        doc = base.__dict__.get('__doc__') if inspect.isclass(base) else base.__doc__
        for names, text in _entries(inspect.cleandoc(doc or '')):
            texts |= dict.fromkeys(re.findall(r'\w+', names), text)
    return texts


def sentence(text: str) -> str:
    """Return the first sentence of a paragraph, without its full stop."""
    return re.split(r'\.(?:\s+(?=[A-Z\'`(])|$)', text, maxsplit=1)[0]


def _entries(doc: str) -> Iterator[tuple[str, str]]:
    """Yield the names and the text of each entry."""
    for lines in _docstring_sections(doc.splitlines()):
        indent = min((_indent(line) for line in lines if line.strip()), default=0)
        names, text = '', ''
        for line in lines:
            match = _DOC_ENTRY.fullmatch(line.strip()) if _indent(line) == indent else None
            if match is None:
                text = f'{text} {line.strip()}'.strip()
                continue
            if names:
                yield names, text
            names, text = match[1], match[2] or ''
        if names:
            yield names, text


def _docstring_sections(lines: list[str]) -> Iterator[list[str]]:
    """Yield the indented lines below each heading."""
    for i, line in enumerate(lines):
        if line in _DOC_SECTIONS:
            below = lines[i + 1 :]
            end = (k for k, text in enumerate(below) if text.strip() and not _indent(text))
            yield below[: next(end, len(below))]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
