"""A mistake in the flags of any command."""

import json
import re

import pytest
from helpers.messages import mentions, says

from vit_jax import __main__ as cli
from vit_jax.commands import launch, rehearse, train
from vit_jax.errors import CommandFinished, nearest


@pytest.mark.parametrize(
    'argv',
    [
        'train --config experiments/vit/digits.py --workdri runs/a',
        'colorize --workdri=runs/a a.png',
        'predict --workdri runs/a a.png',
        'sweep work a --workdri runs/a',
    ],
)
def test_an_unknown_flag_is_named_before_what_is_missing(argv, capsys):
    assert cli.main(argv.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says(line, "unknown flag '--workdri';", "'--workdir'?")


def test_words_after_two_hyphens_are_no_flags(capsys):
    assert cli.main(['predict', '--top', '3', 'a.png']) == 2
    assert 'predict MODEL' in capsys.readouterr().err
    assert cli.main(['colorize', '--workdir', 'none', '--', '--a.png']) == 2
    assert 'unknown flag' not in capsys.readouterr().err


@pytest.mark.parametrize(
    ('name', 'says'),
    [
        ('v5e-7', ('v5e', '7 chips', 'v5e-4', 'v5e-8')),
        ('v4-7', ('7 cores', 'v4-2', 'v4-8')),
    ],
)
def test_a_slice_that_is_not_there(name, says, repo, capsys):
    config = f'{repo}/experiments/vit/digits.py:smoke'
    assert cli.main(['preflight', '--topology', name, '--config', config]) == 2
    assert mentions(capsys.readouterr().err, says)


@pytest.mark.parametrize(
    'argv',
    [
        'attention --workdir none a.png --out {}.png',
        'benchmark --config {config} --json {}.json',
        'colorize --workdir none a.png --out {}.png',
        'colors folder:none --out {}.json',
        'compare none --out {}.png',
        'data --config {config} --config.data.source=folder:none --out {}.png',
        'evaluate --workdir none --report {}.png',
        'evaluate --workdir none --table {}.csv',
        'goodput none --out {}.png',
        'predict --workdir {run} a.png --out {}.png',
        'preflight --config {config} --topology v5e:1x1 --out {}.png',
        'report none --out {}.html',
        'scaling collect none --output {}.csv',
        'scaling coordinates --config {config} --output {}.png',
        'scaling plot --csv none --x a --y b --output {}.png',
        'sweep plot none --output {}.png',
        'translate --workdir none a --output {}.txt',
        'vocab text:none --output {}.model',
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(
    argv, repo, smoke_run, tmp_path, capsys
):
    (tmp_path / 'file').touch()
    out, config = f'{tmp_path}/file/out', f'{repo}/experiments/vit/digits.py:smoke'
    assert cli.main(argv.format(out, config=config, run=smoke_run).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, tmp_path, '/file', 'folder')


@pytest.mark.parametrize(
    ('flags', 'says'),
    [
        ('--num-processes 2', '--num-processes and --process-id need --coordinator HOST:PORT'),
        ('--process-id 0 --num-processes 1', '--num-processes and --process-id need --coordinator'),
        ('--coordinator host --num-processes 2 --process-id 0', "'host': write HOST:PORT"),
        ('--coordinator host:1 --num-processes 0 --process-id 0', '--num-processes 0: must be at'),
        ('--coordinator host:1 --num-processes 2 --process-id 2', '--process-id 2: must be 0 or'),
        ('--coordinator host:1 --process-id -1', '--process-id -1: must be 0 or'),
    ],
)
def test_flags_that_name_no_job(flags, says, repo, tmp_path, capsys):
    argv = f'train --config {repo}/experiments/vit/digits.py:smoke --workdir {tmp_path}/run'
    assert cli.main([*argv.split(), *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    'argv',
    [['{}'], ['{}@2'], ['{}/checkpoints/2'], ['--workdir', '{}'], ['--checkpoint', '{}']],
)
def test_a_run_is_named_first_or_by_a_flag(argv, repo, capsys):
    run = repo / 'tests/golden/run_vit'
    argv = [word.format(run) for word in argv]
    assert cli.main(['evaluate', *argv, '--split', 'test[:4]', '--json']) == 0
    assert json.loads(capsys.readouterr().out)['step'] == 2


@pytest.mark.parametrize(
    ('argv', 'names'),
    [
        (['evaluate', '{}@3'], '3'),
        (['predict', '{}@last', 'a.png'], 'finished steps: 2'),
        (['evaluate', '{}@2', '--step', '1'], 'step 2'),
        (['evaluate', '{}', '--workdir', '{}'], 'run_vit'),
        (['evaluate', 'nothing'], 'nothing'),
        (['evaluate', 'nothing', '--source', 'digits', '--split', 'test'], 'nothing'),
        (['translate', 'nothing@2', 'a'], 'nothing@2'),
        (['predict', '--top', '3', '{}', 'a.png'], '--top'),
        (['export', '{}@best', 'out'], 'best'),
        (['embed', '{}@3', '--out', 'a.npz', 'a.png'], '3'),
        (['attention', '{}@3', '--out', 'a.png', 'a.png'], '3'),
    ],
)
def test_a_model_that_is_not_there(argv, names, repo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = repo / 'tests/golden/run_vit'
    assert cli.main([word.format(run) for word in argv]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert names in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ('argv', 'names'),
    [
        ('launch slurm train {config} --workdir a', '-- train'),
        ('train {config} --config {config} --workdir a', '--config'),
        ('data', 'data CONFIG'),
        ('benchmark --config.seed=1', '--config.seed'),
        ('sweep status --study none --workdir {tmp}', 'none'),
        ('sweep status a --study none', "'a'"),
    ],
)
def test_subjects_that_are_missing_or_given_twice(argv, names, repo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = f'{repo}/experiments/vit/digits.py:smoke'
    assert cli.main(argv.format(config=config, tmp=tmp_path).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert names in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('place', [0, 1, 3])
def test_a_config_is_positional_at_any_place(place, repo, capsys):
    file, others = f'{repo}/experiments/vit/digits.py:smoke', ['--config.seed=7', '--workdir', 'a']
    argv = [*others[:place], file, *others[place:]]
    args, config = train.parse(argv)
    assert (args.config, config.seed) == (file, 7)
    assert rehearse.rehearsal_flags(['train', *argv]) == ['--config', file, *others]
    topology = ['--topology', 'v5e:2x2']
    for command in (['data', file, others[0]], ['preflight', *topology, file, others[0]]):
        config = launch.check_command(command)
        assert config is not None and config.seed == 7
    with pytest.raises(CommandFinished):
        cli.main(['train', '--help'])
    shown = capsys.readouterr().out
    assert shown.startswith('usage: python -m vit_jax train CONFIG')
    assert shown.index('--config.KEY=VALUE') < shown.index('--workdir')


def test_help_shows_the_program_that_was_called(monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['/usr/bin/vit-jax', 'export'])
    with pytest.raises(CommandFinished):
        cli.main(['export', '--help'])
    assert capsys.readouterr().out.startswith('usage: vit-jax export')


def test_former_flags_still_work(tmp_path, capsys):
    table = tmp_path / 'points.csv'
    table.write_text('x,y\n' + ''.join(f'{x},{0.2 + 1 / x}\n' for x in (1, 2, 4, 8, 16, 32)))
    argv = ['scaling', 'fit', '--csv', str(table), '--x', 'x', '--y', 'y', '--form', 'power']
    argv += ['--bootstrap', '0']
    assert cli.main([*argv, '--json']) == 0
    printed = capsys.readouterr()
    assert cli.main([*argv, '--json', str(tmp_path / 'fit.json')]) == 0
    assert '--json' in capsys.readouterr().err and '--json' not in printed.err
    assert (tmp_path / 'fit.json').read_text() == printed.out
    argv = ['vocab', f'text:{tmp_path}/none.tsv', '--output', f'{table}/v.model']
    assert cli.main(argv) == 2
    assert '--out ' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('name', 'choices', 'suggested'),
    [
        ('adamW', ['adam', 'adamw', 'sgd'], 'adamw'),
        ('random_flip', ['flip', 'random_crop'], 'flip'),
        ('--image-sise', ['--image', '--image-size'], '--image-size'),
        ('--device', ['--strict', '--workdir', '--config'], ''),
    ],
)
def test_suggestions(name, choices, suggested):
    suggestion = re.findall(r"did you mean '(.*?)'", nearest('name', name, choices))
    assert suggestion == [suggested] * bool(suggested)


@pytest.mark.parametrize(
    ('argv', 'suggested'),
    [
        (['--lr', '0.002'], '--config.optim.lr=0.002'),
        (['--epochs=50'], "--config.total='50 epochs'"),
        (['--config.lr=0.002'], '--config.optim.lr=0.002'),
        (['--config.optim.clip_norm=0.0'], 'None'),
    ],
)
def test_suggestions_repeat_the_value(argv, suggested, repo, tmp_path, capsys):
    run = ['--workdir', str(tmp_path / 'run')]
    assert cli.main(['train', f'{repo}/experiments/vit/digits.py', *run, *argv]) == 2
    assert suggested in capsys.readouterr().err
