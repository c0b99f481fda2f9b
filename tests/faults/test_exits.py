"""Code of a user's own that calls `sys.exit()`: never the code of a complete run."""

import sys

import pytest
from helpers.runs import linear, undrawn  # noqa: F401

from vit_jax.__main__ import main
from vit_jax.errors import EXIT_FAILED, CommandFinished, ExitByUserCode, forbid_exit
from vit_jax.storage import run_folder
from vit_jax.tasks import classify
from vit_jax.writers import tensorboard

pytestmark = [pytest.mark.usefixtures('one_device'), pytest.mark.fault(126)]


def leave(*_, **__):
    sys.exit(0)


@pytest.mark.slow
@pytest.mark.parametrize('section', ['data', 'evals.test'])
def test_a_source_that_exits_ends_the_run_with_its_place(tmp_path, capsys, section):
    changes = {f'{section}.source': 'helpers.exiting:exit', f'{section}.cache': False}
    assert main(linear(tmp_path / 'run', **changes)) == EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert 'helpers/exiting.py' in line
    assert 'sys.exit(None)' in line
    assert run_folder.read_result(tmp_path / 'run') is None


@pytest.mark.slow
@pytest.mark.process
def test_a_source_that_exits_in_a_reading_process(run_cli, tmp_path):
    changes = {'data.source': 'helpers.exiting:exit', 'data.cache': False, 'data.workers': 1}
    done = run_cli(*linear(tmp_path / 'run', **changes))
    assert done.returncode == EXIT_FAILED
    (line,) = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
    assert 'helpers/exiting.py' in line


@pytest.mark.slow
def test_an_evaluation_is_not_cut_short_by_stop_iteration(tmp_path):
    changes = {'evals.test.source': 'helpers.exiting:stop', 'evals.test.cache': False}
    with pytest.raises(RuntimeError, match='the data raised StopIteration'):
        main(linear(tmp_path / 'run', **changes))
    assert run_folder.read_result(tmp_path / 'run') is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ('owner', 'method'),
    [(classify.Task, 'loss'), (classify.Task, 'evaluate'), (tensorboard.Writer, 'scalars')],
)
def test_a_task_or_writer_that_exits(tmp_path, monkeypatch, capsys, owner, method):
    monkeypatch.setattr(owner, method, leave)
    assert main(linear(tmp_path / 'run')) == EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert 'sys.exit(0)' in line


@pytest.mark.slow
def test_other_commands_on_code_that_exits(smoke_run, monkeypatch, capsys):
    monkeypatch.setattr(classify.Task, 'evaluate', leave)
    assert main(['evaluate', '--workdir', str(smoke_run)]) == EXIT_FAILED
    assert 'sys.exit(0)' in capsys.readouterr().err.splitlines()[-1]


def test_help_is_no_such_exit():
    with pytest.raises(CommandFinished) as stop, forbid_exit():
        main(['train', '--help'])
    assert not stop.value.code
    with pytest.raises(ExitByUserCode), forbid_exit():
        leave()
