"""The import order of the rooms, and who needs what."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'vit_jax'


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


FILES = {module_name(p): p for p in sorted(PACKAGE.rglob('*.py'))}


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@functools.cache
def imports(module: str, lazy: bool = True) -> frozenset[str]:
    """Every module that `module` imports; with `lazy`, also inside of functions."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{module}: relative import'
            assert node.module is not None
            submodules = [f'{node.module}.{alias.name}' for alias in node.names]
            inside = [name for name in submodules if name in FILES]
            found.update(inside)
            if len(inside) < len(submodules):
                found.add(node.module)
        for child in ast.iter_child_nodes(node):
            if lazy or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(child)

    visit(tree(module))
    return frozenset(found)


@functools.cache
def reaches(module: str) -> dict[str, tuple[str, ...]]:
    """Everything that `module` imports, directly or not, and the way there."""
    ways: dict[str, tuple[str, ...]] = {}
    queue = [(module,)]
    while queue:
        way = queue.pop(0)
        for name in sorted(imports(way[-1]) - ways.keys()):
            ways[name] = (*way, name)
            if name in FILES:
                queue.append(ways[name])
    return ways


def within(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(f'{p}.') for p in packages)


def ours(*names: str) -> tuple[str, ...]:
    return tuple(f'vit_jax.{name}' for name in names)


# Rooms, the lower ones first: a module imports from its own row or those above.
ORDER = (
    ('array_types', 'errors', 'extras', 'signatures', 'tree_paths'),
    ('config.run',),
    ('runtime', 'optim', 'nn', 'ops'),
    ('storage', 'models', 'tasks', 'gradients', 'step', 'evaluators', 'writers'),
    ('data', 'checkpoints', 'viz'),
    ('config',),
    ('interop',),
    ('inference',),
    ('profiling',),
    ('trainer',),
    ('rehearsal', 'scaling', 'sweeps', 'launch'),
    ('commands', '__main__'),
)
ROOMS = [room for row in ORDER for room in row]
KEYS = tuple(f'vit_jax.{name}' for name in ORDER[1])  # modules of a room that stand above it
TRAINER = ours('config', 'trainer', 'checkpoints', 'optim', 'runtime')
# All but their base.
TASKS = tuple(m for m in FILES if m.startswith('vit_jax.tasks.') and m != 'vit_jax.tasks.base')
# What a room must not reach besides the rows below its own.
FORBIDDEN = {
    'nn': ours('ops', 'optim', 'runtime'),
    'ops': (*ours('nn', 'optim', 'runtime'), 'flax'),
    'models': (*ours('tasks', 'step'), *TRAINER),
    'tasks': (*ours('models', 'step'), *TRAINER),
    'gradients': (*ours('models', 'tasks'), *TRAINER),
    'step': (*ours('models'), *TASKS, *ours('config', 'trainer', 'checkpoints', 'runtime')),
    'evaluators': (*ours('nn', 'models', 'tasks', 'step'), *TRAINER, 'jax', 'flax'),
    'data': (*ours('nn', 'models', 'tasks', 'step', 'checkpoints', 'viz', 'optim'), 'flax'),
    'viz': (*ours('models', 'tasks', 'step', 'data'), *TRAINER),
    'interop': TASKS,
    'scaling': (*ours('models', 'tasks', 'step', 'data', 'trainer', 'config'), 'flax'),
    'launch': (*ours('nn', 'models', 'tasks', 'step', 'data', 'storage', 'trainer'), 'jax', 'flax'),
}
# An evaluator that trains imports JAX, in its functions.
TRAINS = {'vit_jax.evaluators.patch_probe': ('jax',)}


def below(room: str) -> tuple[str, ...]:
    """Every room of the rows below that of `room`."""
    row = next(i for i, rooms in enumerate(ORDER) if room in rooms)
    return tuple(name for rooms in ORDER[row + 1 :] for name in rooms)


def test_every_module_is_in_a_room():
    assert not [m for m in FILES if m != 'vit_jax' and not within(m, *ours(*ROOMS))]


@pytest.mark.parametrize('room', ROOMS)
def test_no_module_imports_what_stands_below_it(room):
    modules = [m for m in FILES if within(m, *ours(room)) and (m not in KEYS or '.' in room)]
    forbidden = (*ours(*below(room)), *FORBIDDEN.get(room, ()))
    allowed = () if room in ORDER[0] else KEYS
    wrong = [
        ' -> '.join(way)
        for module in modules
        for name, way in reaches(module).items()
        if within(name, *forbidden)
        and name not in allowed
        and not within(name, *TRAINS.get(module, ()))
    ]
    assert modules
    assert not wrong


def test_keys_of_configs_are_declared_without_anything_else():
    own = {name for name in reaches('vit_jax.config.run') if within(name, 'vit_jax')}
    others = {name.partition('.')[0] for name in reaches('vit_jax.config.run')} - {'vit_jax'}
    assert imports('vit_jax.config.run') & own == {'vit_jax.errors'}
    assert others <= sys.stdlib_module_names


def test_checkpoints_of_others_are_read_without_the_step():
    assert not [m for m in FILES if within(m, *ours('interop')) and 'vit_jax.step' in imports(m)]


def texts(source: ast.Module) -> Iterator[str]:
    """The strings of a module but for its docstrings; the fields of f-strings are `*`."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(source) if isinstance(node, documented)]
    seen = {body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in ast.walk(source):
        if isinstance(node, ast.JoinedStr):
            seen.update(node.values)
            yield ''.join(part.value if is_text(part) else '*' for part in node.values)
        elif is_text(node) and node not in seen:
            yield node.value


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def names(source: ast.Module) -> set[str]:
    """The dotted names in the package that strings of a module name, also inside of longer ones.

    The end of a name that is only known when the module runs is `*`.
    """
    found = [re.findall(r'\bvit_jax\.[\w.*]*', text) for text in texts(source)]
    return {name + '*' * name.endswith('.') for listed in found for name in listed}


def module_of(name: str) -> str:
    """The module of a dotted name, which may be that of something in it."""
    return name if name in FILES else name.rpartition('.')[0]


def named_below(source: ast.Module, room: str) -> set[str]:
    """Names in the strings of a module of a room that stand for something below it."""
    whole = {name for name in names(source) if name.split('.')[1] == '*' and below(room)}
    return whole | {name for name in names(source) if within(name, *ours(*below(room)))}


@pytest.mark.parametrize('room', ROOMS)
def test_no_string_names_a_module_below(room):
    modules = [m for m in FILES if within(m, *ours(room))]
    found = {module: named_below(tree(module), room) for module in modules}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ('code', 'found'),
    [
        ('NAME = "vit_jax.trainer.build"', {'vit_jax.trainer.build'}),
        ('words = ["-m vit_jax.rehearsal.dry_run"]', {'vit_jax.rehearsal.dry_run'}),
        ('import_module(f"vit_jax.trainer.{name}")', {'vit_jax.trainer.*'}),
        ('import_module(f"vit_jax.{room}")', {'vit_jax.*'}),
        ('import_module("vit_jax." + room)', {'vit_jax.*'}),
        ('import_module("vit_jax.%s" % room)', {'vit_jax.*'}),
        ('def f():\n    """See `vit_jax.trainer.build`."""\n    return "vit_jax.models"', set()),
    ],
)
def test_strings_that_name_a_module_below_are_seen(code, found):
    assert named_below(ast.parse(code), 'config') == found


# Functions that import by a name that is a string.
IMPORTERS = {'import_module', '__import__', 'run_module', 'resolve_name'}
# Modules that call them with a name that only a config, a command line or the caller has.
FINDERS = {
    'vit_jax',  # its functions, and the modules that define them
    'vit_jax.commands._catalog',  # packages that `list` shows
    'vit_jax.data.transforms.registry',  # transforms of a config
    'vit_jax.errors',  # `resolve`: what a config names
    'vit_jax.profiling.variants',  # models that `list variants` counts
    'vit_jax.viz.predictions',  # pictures of a task that a config names
}


def imports_by_variable(source: ast.Module) -> bool:
    """Whether a module imports by a name whose beginning is no string in it."""
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call)]
    by_name = [c for c in calls if ast.unparse(c.func).rpartition('.')[2] in IMPORTERS]
    starts = [getattr(c.args[0], 'values', c.args)[0] if c.args else c for c in by_name]
    return not all(map(is_text, starts))


def test_only_finders_import_by_the_value_of_a_variable():
    assert {m for m in FILES if imports_by_variable(tree(m))} == FINDERS


@pytest.mark.parametrize(
    'code', ['import_module(name)', '__import__("vit_" + name)', 'import_module(f"{name}.build")']
)
def test_an_import_by_the_value_of_a_variable_is_seen(code):
    assert imports_by_variable(ast.parse(code))


def names_nothing(name: str) -> bool:
    """Whether a dotted name is neither a module nor defined in one."""
    body = tree(module_of(name)).body
    defined = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return name not in FILES and name.rpartition('.')[2] not in defined


def test_names_in_strings_are_of_something():
    named = {m: [t for t in texts(tree(m)) if re.fullmatch(r'vit_jax(\.\w+)+', t)] for m in FILES}
    assert any(named.values())
    assert {m: wrong for m in FILES if (wrong := list(filter(names_nothing, named[m])))} == {}


def test_no_module_imports_itself_by_a_detour():
    assert not [' -> '.join(reaches(m)[m]) for m in FILES if m in reaches(m)]


@pytest.mark.parametrize('module', FILES)
def test_tensorflow_and_torch_are_never_imported_at_import_time(module):
    assert not [m for m in imports(module, lazy=False) if within(m, 'tensorflow', 'torch')]


DEVICES = {
    'devices',
    'local_devices',
    'device_count',
    'local_device_count',
    'make_mesh',
    'mesh_utils',
    'pmap',
    'Mesh',
    'NamedSharding',
}


def attribute_names(module: str) -> set[str]:
    """What `module` takes from jax: `jax.x.y` and `from jax.x import y` give y."""
    names = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith('jax.'):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and within(node.module or '', 'jax'):
            names.update(alias.name for alias in node.names)
    return names


def test_only_three_modules_name_devices():
    here = ['vit_jax.runtime.mesh', 'vit_jax.runtime.sharding', 'vit_jax.nn.device']
    assert set().union(*map(attribute_names, here)) >= {'devices', 'mesh_utils', 'pmap'}
    elsewhere = {m: attribute_names(m) & DEVICES for m in FILES if m not in here}
    assert {m: names for m, names in elsewhere.items() if names} == {}


def loaded_by(*arguments: str) -> set[str]:
    """The top-level names of the modules that a fresh interpreter has loaded at its end."""
    code = (
        'import atexit, runpy, sys\n'
        'atexit.register(lambda: print("\\n" + " ".join({m.split(".")[0] for m in sys.modules})))\n'
        + arguments[0]
    )
    done = subprocess.run(
        [sys.executable, '-c', code, *arguments[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


NUMERICS = {'jax', 'flax', 'numpy', 'ml_collections'}
DATA_STACK = {'ml_collections', 'grain', 'tensorflow_datasets', 'orbax', 'array_record'}
SCREEN = {'matplotlib', 'tensorboard', 'sklearn', 'PIL'}


def test_the_package_alone_imports_nothing():
    assert not loaded_by('import vit_jax') & NUMERICS


def test_the_list_of_commands_imports_no_numerics():
    run = 'runpy.run_module("vit_jax", run_name="__main__")'
    assert not loaded_by(f'try: {run}\nexcept SystemExit as e: assert not e.code') & NUMERICS


def modules_not_of(*projects: str) -> set[str]:
    """Installed top-level modules, but for those of the projects and of all that they require."""
    required: set[str] = set()
    queue = list(projects)
    while queue:
        if (project := normalized(queue.pop())) not in required:
            required.add(project)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                lines = importlib.metadata.requires(project) or ()
                queue += [re.split('[^\\w.-]', x)[0] for x in lines if 'extra ==' not in x]
    owners = importlib.metadata.packages_distributions()
    return {m for m, names in owners.items() if not required & set(map(normalized, names))}


def normalized(project: str) -> str:
    return re.sub('[-_.]+', '-', project).lower()


APPLY_A_VIT = """
import jax
from vit_jax.models import vit

model = vit.Model(num_classes=3, **vit.variant('mu/16'))
images = jax.numpy.zeros((2, 32, 32, 3))
variables = model.init(jax.random.key(0), images, train=False)
assert model.apply(variables, images, train=False)['logits'].shape == (2, 3)
"""


@pytest.mark.slow
def test_models_need_only_jax_flax_and_numpy():
    hidden = modules_not_of('jax', 'flax', 'numpy') - {'vit_jax'}
    assert hidden > {'jaxtyping', 'ml_collections', 'grain'}
    hide = f'sys.modules.update(dict.fromkeys({hidden}))\n'
    models = '\n'.join(f'import {m}' for m in FILES if within(m, 'vit_jax.models'))
    loaded = loaded_by(hide + models + APPLY_A_VIT) - hidden
    assert {'jax', 'flax'} <= loaded
    assert not loaded & (DATA_STACK | SCREEN | {'tensorflow', 'torch'})


@pytest.mark.slow
def test_training_needs_neither_tensorflow_nor_torch_nor_matplotlib():
    shown = ', '.join(m for m in FILES if within(m, 'vit_jax.tasks') and m.count('.') == 2)
    viz = ', '.join(name for name in shown.replace('tasks', 'viz').split(', ') if name in FILES)
    commands = 'vit_jax.commands.train, vit_jax.commands.evaluate'
    loaded = loaded_by(
        f'import vit_jax.trainer.train, vit_jax.inference.predict, {commands}, {viz}'
    )
    assert {'jax', 'flax'} <= loaded
    assert not loaded & {'orbax', 'tensorflow', 'torch', 'transformers', 'optuna'}
    assert not loaded & {'matplotlib', 'sklearn'}
