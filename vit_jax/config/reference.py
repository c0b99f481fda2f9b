"""Reference of config keys, from signatures and docstrings, and lists of names for a config."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import defaults, load, schema
from vit_jax.errors import UserError, modules, resolve
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
# What the files below experiments/ define: a config for `train`, a sweep for `sweep create`.
FILE_FUNCTIONS = ('get_config', 'get_sweep')
_DOC_SECTIONS = ('Args:', 'Attributes:')
_DOC_ENTRY = re.compile(r'([*\w, ]+?)(?: \([^)]*\))?:(?:\s+(.*))?')


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a section.

    Attributes:
      name: in its section.
      type: of its values, in words.
      default: in Python syntax; empty if the key is required.
      text: description in the constructor's docstring.
      value: in a config, in Python syntax; empty without a config.
    """

    name: str
    type: str
    default: str
    text: str
    value: str = ''

    @property
    def line(self) -> str:
        """The first sentence of `text`."""
        return sentence(self.text)


@dataclasses.dataclass(frozen=True)
class Named:
    """Something that a config or the command line may name.

    Attributes:
      name: as written there; the file of an experiment.
      line: description.
      arguments: as text; empty for none.
    """

    name: str
    line: str
    arguments: str = ''


@dataclasses.dataclass(frozen=True)
class Experiment(Named):
    """A file below `experiments/`.

    Attributes:
      functions: names of `FILE_FUNCTIONS` that it defines.
    """

    functions: tuple[str, ...] = ()


def config_keys(config: ConfigDict) -> dict[str, list[Key]]:
    """The valid keys of each section of a config, as {'config.optim.schedule': keys}.

    Args:
      config: checked.
    """
    found: dict[str, list[Key]] = {}
    for section in _sections(config):
        known = schema.parameters(config, section)
        values_only = {name: p for name, p in known.items() if schema.accepted_types(p) != (dict,)}
        given = defaults.find_section(config, section) if section else config
        readers = schema.readers(config, section)
        found[f'config.{section}'.rstrip('.')] = keys(values_only, readers, given)
    return found


def package_keys() -> dict[str, list[Key]]:
    """The keys of everything in this package that a config may name, {heading: keys}.

    Optax's optimizers are left out, since their keys depend on the installed version.
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
            found[f'{heading}{name}'] = keys(schema.constructor_keys(cls), [cls])
    return {heading: listed for heading, listed in found.items() if listed}


def keys(known: Parameters, readers: Iterable[Callable], given: Any = None) -> list[Key]:
    """The keys of a section.

    Args:
      known: its parameters.
      readers: the constructors whose docstrings describe them.
      given: the section of a config, if any.
    """
    texts: dict[str, str] = {}
    for reader in readers:
        texts |= {schema.key_name(k): text for k, text in parameter_docs(reader).items()}
    found = []
    for name, p in ((schema.key_name(name), p) for name, p in known.items()):
        default = _default(p)
        value = '' if given is None else repr(given[name]) if name in given else default
        found.append(Key(name, _type(p), default, texts.get(name, ''), value))
    return found


def markdown(sections: Mapping[str, list[Key]]) -> str:
    """A page that lists the keys of sections, as returned by `package_keys`."""
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
    if schema.accepted_types(parameter) == (dict,):
        # A dataclass has a factory for it instead of a mapping.
        return repr(dict(parameter.default) if isinstance(parameter.default, Mapping) else {})
    return repr(parameter.default)


def _type(parameter: inspect.Parameter) -> str:
    if is_duration(parameter.annotation):
        return 'duration or None' if parameter.default is None else 'duration'
    if are_durations(parameter.annotation):
        return 'tuple of durations'
    return schema.type_names(schema.accepted_types(parameter)) or 'any'


def _sections(config: ConfigDict) -> Iterator[str]:
    """The config itself, '', and its groups in the order of `schema.Config`."""
    yield ''
    for name, parameter in keyword_only(schema.Config).items():
        if name == 'evals':
            yield from (f'evals.{entry}' for entry in config.evals)
        elif schema.accepted_types(parameter) == (dict,):
            yield name
        yield from schema.nested_sections(name)


def parameter_docs(constructor: Callable) -> dict[str, str]:
    """The description of each parameter of a function or class, as one paragraph.

    A class inherits the descriptions of its bases.

    Args:
      constructor: its docstring describes the parameters as `name: text` or `one, two: text`.
    """
    classes = inspect.getmro(constructor) if inspect.isclass(constructor) else (constructor,)
    found: dict[str, str] = {}
    for one in reversed(classes):
        own = one.__dict__.get('__doc__') if inspect.isclass(one) else one.__doc__
        for names, text in _entries(inspect.cleandoc(own or '')):
            found |= dict.fromkeys(re.findall(r'\w+', names), text)
    return found


def sentence(text: str) -> str:
    """The first sentence of a paragraph, without its full stop."""
    return re.split(r'\.(?:\s+(?=[A-Z\'`(])|$)', text, maxsplit=1)[0]


def _entries(doc: str) -> Iterator[tuple[str, str]]:
    """The names and the text of each entry."""
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
    """The indented lines below each heading."""
    for i, line in enumerate(lines):
        if line in _DOC_SECTIONS:
            below = lines[i + 1 :]
            end = (k for k, text in enumerate(below) if text.strip() and not _indent(text))
            yield below[: next(end, len(below))]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def list_modules(package: str) -> list[Named]:
    """The modules of a package, read without importing them."""
    (folder,) = importlib.import_module(package).__path__
    files = {name: pathlib.Path(folder) / name for name in modules(package)}
    return [Named(name, _line_of_file(_source_of(path))) for name, path in files.items()]


def transforms() -> list[Named]:
    """Functions for `config.data.transforms`, with their arguments."""
    from vit_jax.data.transforms import registry

    found = sorted(registry.plain().items())
    return [Named(name, first_line(f), _signature(f)) for name, f in found]


def optimizers() -> list[Named]:
    """Valid values of `config.optim.name`."""
    from vit_jax.optim import make

    return [Named(name, first_line(make.factory(name))) for name in make.optimizers()]


def schedules() -> list[Named]:
    """Valid values of `config.optim.schedule.name`."""
    from vit_jax.optim import schedules

    return [Named(name, first_line(shape)) for name, shape in schedules.SHAPES.items()]


def experiments(folder: pathlib.Path | None = None) -> list[Experiment]:
    """The configs and sweeps below a folder and their arguments; each file is executed.

    By default those of the package, under names that `--config` and `sweep create` accept.

    Raises:
      UserError: if the folder does not exist, or a file is not Python.
    """
    if folder is None:
        inside = experiments(load.FOLDER)
        return [
            dataclasses.replace(
                named, name=load.experiment_name(named.name.removeprefix(f'{load.FOLDER}/'))
            )
            for named in inside
        ]
    if not folder.is_dir():
        raise UserError(f'no folder {str(folder)!r} of experiments')
    defined = {path: _file_functions(path) for path in sorted(folder.rglob('*.py'))}
    return [
        Experiment(str(path), _line_of_file(path), _arguments(path), functions)
        for path, functions in defined.items()
        if functions
    ]


def first_line(thing: Any) -> str:
    """The first line of a docstring; empty without one."""
    return (inspect.getdoc(thing) or '').partition('\n')[0]


def _signature(function: Callable) -> str:
    """`(size, method='bilinear')`: the arguments that a config may give, without annotations."""
    known = inspect.signature(function).parameters.values()
    given = [p.replace(annotation=p.empty) for p in known if p.name != 'vocab']
    return str(inspect.Signature(given))


def _arguments(path: pathlib.Path) -> str:
    """The arguments that an experiment lists; `...` if it also accepts others."""
    found = getattr(load.load_module(str(path), str(path)), 'ARGS', ())
    return ' '.join('...' if arg is ... else arg for arg in found)


def _file_functions(path: pathlib.Path) -> tuple[str, ...]:
    text = path.read_text()
    return tuple(name for name in FILE_FUNCTIONS if f'def {name}(' in text)


def _line_of_file(path: pathlib.Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or '').partition('\n')[0]


def _source_of(path: pathlib.Path) -> pathlib.Path:
    """The file of a module or of a package."""
    return path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
