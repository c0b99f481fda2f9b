"""Private names of libraries that the package uses, and whether each is still needed."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import pathlib

import jax
import optuna
import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / 'vit_jax'
# By module, with the reason in a comment there.
USED = {
    # The flags of a parser, and their texts as --help shows them.
    'commands/_parser.py': {
        '._option_string_actions',
        '._actions',
        '._get_formatter',
        '._expand_help',
        '._format_action_invocation',
    },
    # Reading processes do not run the user's script.
    'data/read_ahead.py': {'set spawn.get_preparation_data'},
    # The processes of a job meet before JAX connects them, and keep the client.
    'runtime/processes.py': {
        'from jax._src.distributed',
        'set made_by.get_distributed_runtime_client',
        'set made_by.get_distributed_runtime_service',
    },
    # fsspec documents its coroutines by these names.
    'storage/ranges.py': {'._cat_file', '._ls'},
    # A storage of Optuna takes the ids of trials.
    'sweeps/worker.py': {'._trial_id'},
}
# Documented names of Python.
PUBLIC = {'._replace', '._asdict', '._fields', '._exit', '._current_frames'}


def private_names(source: str) -> set[str]:
    """Private imports, private attributes of what is defined elsewhere, and patches in a module."""
    tree = ast.parse(source)
    found, own, modules = set(), own_names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not is_ours(node.module):
            found |= {f'from {node.module}'} if has_private_part(node.module) else set()
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {f'import {a.name}' for a in node.names if has_private_part(a.name)}
            modules |= {a.asname or a.name.partition('.')[0] for a in node.names}
        elif is_text(node) and '._src' in node.value:
            found.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and has_private_part(node.attr):
            found |= {f'.{node.attr}'} - (inherited() if of_self(node) else own)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            if owner.partition('.')[0] in modules - STANDARD:
                found.add(f'set {owner}.{node.attr}')
        if isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'setattr':
            owner = ast.unparse(node.args[0])
            if owner.partition('.')[0] in modules - STANDARD:
                found.add(f'set {owner}')
    return found - PUBLIC


# Hooks of Python and switches of `sys` are no patches of a library.
STANDARD = {'sys', 'os'}


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def of_self(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ('self', 'super()')


def is_ours(module: str | None) -> bool:
    return (module or '').partition('.')[0] == 'vit_jax'


def has_private_part(name: str | None) -> bool:
    parts = (name or '').split('.')
    return any(part.startswith('_') and not part.startswith('__') for part in parts)


@functools.cache
def inherited() -> set[str]:
    """The private methods and attributes of all classes of the package."""
    return set().union(*(own_names(ast.parse(p.read_text())) for p in PACKAGE.rglob('*.py')))


def own_names(tree: ast.Module) -> set[str]:
    """The private methods and attributes that a module defines."""
    defined = {
        n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            targets = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
            targets += [t for n in node.body if isinstance(n, ast.Assign) for t in n.targets]
            defined |= {ast.unparse(target) for target in targets}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined |= {node.attr} if ast.unparse(node.value) in ('self', '_local') else set()
    return {f'.{name}' for name in defined}


@functools.cache
def used() -> dict[str, set[str]]:
    files = {p.relative_to(PACKAGE).as_posix(): p.read_text() for p in PACKAGE.rglob('*.py')}
    found = {name: private_names(text) for name, text in files.items()}
    return {name: names for name, names in found.items() if names}


@pytest.mark.slow
def test_only_these_modules_use_private_names_of_libraries():
    assert used() == USED


@pytest.mark.parametrize(
    ('code', 'found'),
    [
        ('from jax._src import core', 'from jax._src'),
        ('import jax._src.core', 'import jax._src.core'),
        ('log = getLogger("jax._src.xla_bridge")', 'jax._src.xla_bridge'),
        ('study._storage.get_trial(1)', '._storage'),
        ('import optax\noptax.adam = f', 'set optax.adam'),
        (
            'from orbax import checkpoint as ocp\nsetattr(ocp.handlers, "save", f)',
            'set ocp.handlers',
        ),
    ],
)
def test_a_private_name_or_a_patch_is_seen(code, found):
    assert found in private_names(code)


def test_jax_has_no_public_client_hook_or_callback():
    """Else `runtime.processes._rendezvous_first` and `handle_abort` may become simpler."""
    public = {name for name in vars(jax.distributed) if not name.startswith('_')}
    assert public == {'initialize', 'is_initialized', 'shutdown'}
    parameters = set(inspect.signature(jax.distributed.initialize).parameters)
    from_0_12 = {name for name in parameters if name.startswith(('mtls_', 'verify_'))}
    assert parameters - from_0_12 == {
        'coordinator_address',
        'num_processes',
        'process_id',
        'local_device_ids',
        'cluster_detection_method',
        'initialization_timeout',
        'heartbeat_timeout_seconds',
        'shutdown_timeout_seconds',
        'coordinator_bind_address',
        'slice_index',
        'partition_index',
    }


def test_a_parser_has_no_public_list_of_flags():
    parser = argparse.ArgumentParser(prog='a')
    parser.add_argument('--workdir')
    public = [value for name, value in vars(parser).items() if not name.startswith('_')]
    assert not any('--workdir' in str(value) for value in public)


def test_trials_of_optuna_have_no_public_id():
    trial = optuna.trial.create_trial(value=0.0)
    assert not [name for name in dir(trial) if name.endswith('id') and not name.startswith('_')]


def test_file_systems_have_no_public_coroutines():
    from fsspec.asyn import AsyncFileSystem

    for name in ('cat_file', 'ls'):
        assert inspect.iscoroutinefunction(getattr(AsyncFileSystem, f'_{name}'))
        assert not inspect.iscoroutinefunction(getattr(AsyncFileSystem, name, None))
