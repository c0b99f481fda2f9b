"""Steps compiled for TPUs that are not here."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys

import jax
import optax
import pytest
from helpers.messages import mentions, says
from test_readme import ROOT, commands_in

from vit_jax import __main__
from vit_jax.commands import launch
from vit_jax.commands import preflight as command
from vit_jax.config import load
from vit_jax.config.run import Step
from vit_jax.errors import EXIT_FAILED, UserError
from vit_jax.nn.attention import POLICIES
from vit_jax.profiling import compile_for, cost, hlo, pipeline, preflight, roofline, topology
from vit_jax.rehearsal import ahead_of_time
from vit_jax.step import make_eval_step, make_predict_step, make_train_step
from vit_jax.tasks import classify
from vit_jax.tasks.base import Snapshot

DIGITS = 'experiments/vit/digits.py:smoke'
LINEAR = 'tests/helpers/linear.py'
with_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec('jax_plugins') is None
    or importlib.util.find_spec('jax_plugins.xla_cuda13') is None,
    reason="the compiler of GPUs is not installed: pip install -e '.[preflight-gpu]'",
)
with_compiler = pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None,
    reason="libtpu, the compiler of TPUs, is not installed: pip install -e '.[preflight]'",
)


def run(*words):
    return __main__.main(['preflight', *words])


@pytest.fixture
def fake_compiler(monkeypatch):
    """In place of the compiler: batches of more than 64 rows do not fit."""
    asked = []

    def compile_step(request, program, *, cycles=False):
        asked.append(request)
        rows = request['config']['batch_size']
        facts = {
            'parameters': 10,
            'steps': 3600,
            'refusal': 'a warm-up that is too long' if rows in (16, 64) else '',
            'state': {'params': 40, 'opt_state': 80, 'ema': 0, 'collections': 0},
            'unit': 8,
            'mesh': {'slice': 1, 'data': 4, 'fsdp': 1, 'tensor': 1},
            'kinds': [
                {
                    **{'rows': rows, 'share': 1, 'shapes': {}},
                    'flops': {'train': 300, 'eval': 100, 'predict': 100},
                }
            ],
        }
        if rows > 64:
            return compile_for.Compiled(facts, '', '', 1.0, (rows * 2.0**28, 2.0**34))
        text = (
            'HloModule m\n\nENTRY %main (x: f32[8,128]) -> f32[8,128] {\n'
            '  %x = f32[8,128]{1,0:T(8,128)} parameter(0)\n'
            '  ROOT %y = f32[8,128]{1,0:T(8,128)} negate(%x)\n}\n'
        )
        return compile_for.Compiled(facts, text, 'allocation 0: size 4096, parameter 0:\n', 1.0)

    monkeypatch.setattr(preflight, 'compile_step', compile_step)
    monkeypatch.setattr(topology, 'require_compiler', lambda _: None)
    return asked


def test_numbers_of_a_run_follow_from_its_step(fake_compiler, capsys):
    argv = ('--config', DIGITS, '--topology', 'v5e:2x2', '--price', '2', '--json')
    assert run(*argv) == 0
    record = json.loads(capsys.readouterr().out)
    (step,) = record['steps']
    assert step['bytes'] == 2 * 4096
    assert step['bound'] == pytest.approx(2 * 4096 / 819e9)
    assert step['mfu_bound'] == pytest.approx(300 / (4 * 197e12 * step['bound']))
    assert record['run']['hours'] == pytest.approx(step['bound'])
    assert record['run']['cost'] == pytest.approx(2 * 4 * step['bound'])


def test_gpus_have_the_memory_that_jax_allocates(fake_compiler, monkeypatch, capsys):
    argv = ('--config', DIGITS, '--topology', 'h100:4', '--price', '2')
    assert run(*argv, '--json') == 0
    record = json.loads(capsys.readouterr().out)
    (step,) = record['steps']
    assert step['usable'] == 0.75 * topology.GPUS['h100'].hbm
    assert step['mfu_bound'] == pytest.approx(300 / (4 * 989e12 * step['bound']))
    assert record['run']['cost'] == pytest.approx(2 * 4 * step['bound'])
    # The compiler of GPUs does not refuse a step that is too large.
    monkeypatch.setenv(topology.MEMORY_FRACTIONS[0], '1e-8')
    assert run(*argv) == EXIT_FAILED
    printed = capsys.readouterr().out
    assert 'does not fit' in printed and 'at least' not in printed.partition('with ')[0]
    assert '--config.parallel.fsdp=4 ' in printed


def test_exchanges_between_slices_are_a_table_and_in_the_record(fake_compiler, capsys):
    argv = ('--config', DIGITS, '--topology', 'v5litepod-4 x 2')
    assert run(*argv) == 0
    shown = capsys.readouterr().out
    assert 'on 2xv5e:2x2' in shown and 'on 8 chips' in shown
    for name in ('25 Gb/s, as scheduled', '50 Gb/s, at best', '100 Gb/s, at best'):
        assert name in shown
    assert fake_compiler[0]['topology'] == '2xv5e:2x2'
    assert run(*argv, '--json') == 0
    (step,) = json.loads(capsys.readouterr().out)['steps']
    assert step['crossing']['slices'] == 2
    assert step['crossing']['speeds'][2]['best'].keys() >= {'hidden', 'step', 'pays_from'}
    assert run(*argv[:-1], 'v5e:2x2', '--json') == 0
    (step,) = json.loads(capsys.readouterr().out)['steps']
    assert step['crossing'] is None


def test_parameters_that_do_not_fit_are_split_within_a_slice(fake_compiler, capsys):
    argv = ('--config', DIGITS, '--topology', '2xv5e:2x2', '--config.batch_size=128')
    assert run(*argv) == EXIT_FAILED
    assert '--config.parallel.fsdp=4 ' in capsys.readouterr().out


def test_what_does_not_fit_is_compiled_with_each_remedy(fake_compiler, capsys):
    argv = ('--config', DIGITS, '--topology', 'v5e:2x2', '--config.batch_size=128')
    assert run(*argv) == EXIT_FAILED
    printed = capsys.readouterr().out
    assert 'does not fit: 32 of 16 GiB' in printed
    policies = ('model.remat=dots', 'model.remat=names', 'model.remat=nothing')
    tried = (*policies, 'parallel.fsdp=4', 'step.accum_steps=2', 'batch_size=64')
    assert len(fake_compiler) == 1 + len(tried)
    for override in tried:
        assert f'--config.{override} ' in printed
    assert [r['config']['model'].get('remat') for r in fake_compiler[1:4]] == list(POLICIES)
    assert fake_compiler[4]['config']['parallel']['fsdp'] == 4
    insufficient = 'enough'
    assert insufficient not in printed
    assert run(*argv[:-1], '--config.batch_size=256') == EXIT_FAILED
    assert insufficient in capsys.readouterr().out


def test_scan_that_does_not_fit_is_explained(fake_compiler, capsys):
    argv = ('--config', DIGITS, '--topology', 'v5e:2x2', '--config.batch_size=128')
    assert run(*argv, '--config.model.scan=True') == EXIT_FAILED
    printed = capsys.readouterr().out
    assert mentions(printed, 'model.scan=True', 'model.remat')
    for override in ('model.remat=dots', 'model.remat=names', 'model.scan=False'):
        assert f'--config.{override} ' in printed
    assert run(*argv, '--config.model.scan=True', '--config.model.remat=names') == EXIT_FAILED
    printed = capsys.readouterr().out
    assert 'without model.remat' not in printed
    assert 'model.remat=dots' not in printed, 'it keeps more than names do'
    assert '--config.model.remat=nothing ' in printed


def test_the_largest_batch_that_fits_is_found(fake_compiler, capsys):
    assert run('--config', DIGITS, '--topology', 'v5e:2x2', '--batch-size', 'fit') == 0
    assert 'batch 64 on' in capsys.readouterr().out
    sizes = [request['config']['batch_size'] for request in fake_compiler]
    assert sorted(sizes) == sorted(set(sizes)), 'each is compiled once'


@pytest.mark.parametrize(
    ('flags', 'batches', 'chosen'),
    [
        # Of 32, 48 and 64 examples in 4, 5 and 8 ms, the second is the fastest.
        (('--batch-size', 'fit'), {'False': 32, 'dots': 48, 'names': 64, 'nothing': 64}, 'dots'),
        (('--config.batch_size=64',), dict.fromkeys(('names', 'nothing'), 64), 'names'),
    ],
)
def test_recomputation_and_batch_are_searched_together(flags, batches, chosen, monkeypatch, capsys):
    most = {'False': 32, 'dots': 48, 'names': 64, 'nothing': 64}
    seconds = {'False': 0.004, 'dots': 0.005, 'names': 0.008, 'nothing': 0.009}
    asked = []

    def compile_step(config, topology, program, **options):
        remat, rows = str(config.model.remat), config.batch_size
        asked.append((remat, rows))
        fits = rows <= most[remat]
        report = preflight.Report(
            *('v5e:2x2', 4, 'train', rows, {}, 10, {}, 2.0**34, 2.0**34, 300, 197e12),
            compile_seconds=1.0,
            fits=fits,
            bound=seconds[remat] * fits,
        )
        return [report], preflight.RunEstimate(20, report.bound, 4, rows=rows)

    monkeypatch.setattr(preflight, 'preflight', compile_step)
    monkeypatch.setattr(topology, 'require_compiler', lambda _: None)
    argv = ('--config', DIGITS, '--topology', 'v5e:2x2', '--config.batch_size=16', *flags)
    assert run(*argv, '--remat', 'fit', '--json') == 0
    record = json.loads(capsys.readouterr().out)
    fitting = {
        name.partition('=')[2]: r['rows'] for name, r in record['remat'].items() if r['fits']
    }
    assert fitting == batches
    assert record['steps'][0]['bound'] == seconds[chosen]
    assert len(asked) == len(set(asked)), 'each is compiled once'
    assert run(*argv, '--remat', 'fit') == 0
    assert f'model.remat={chosen} has the most' in capsys.readouterr().out


def test_inference_is_compiled_for_a_run_or_a_config(fake_compiler, smoke_run, capsys):
    slice_ = ('--topology', 'v5e:1x1')
    assert run('--workdir', str(smoke_run), *slice_, '--batch-size', 'fit') == 0
    printed = capsys.readouterr().out
    assert 'eval step' in printed and 'batch 64 on' in printed
    (rate,) = re.findall(r'at most ([\d,]+) examples/s', printed)
    assert int(rate.replace(',', '')) == pytest.approx(64 / (2 * 4096 / 819e9), rel=1e-3)
    assert 'the run: ' not in printed, 'nothing is trained'
    fake_compiler.clear()
    argv = ('--batch-size', '16', '--predict', '--json')
    assert run('--config', DIGITS, *slice_, *argv) == 0, 'no matter how long it would train'
    (step,) = json.loads(capsys.readouterr().out)['steps']
    assert step['rows'] == 16 and step['examples_per_sec_bound'] > 0
    assert [request['step'] for request in fake_compiler] == ['predict']
    for argv in (['--accum', 'fit'], ['--data-rate']):
        with pytest.raises(UserError, match='training step'):
            command.main(['--workdir', str(smoke_run), *slice_, *argv])


@pytest.mark.slow
def test_the_step_of_prediction_can_be_lowered(one_device):
    config = load.load(LINEAR)
    facts = cost.data_facts(config)
    lowered_steps, _ = ahead_of_time.program(facts, jax.devices()[:1])
    assert (
        'predict_step'
        in ahead_of_time.lower(lowered_steps, facts.kinds[-1], 'predict').as_text()[:200]
    )


def test_a_schedule_that_does_not_fit_is_noted_after_the_answer(fake_compiler, capsys):
    argv = ('--config', DIGITS, '--topology', 'v5e:2x2')
    assert run(*argv, '--batch-size', 'fit') == 0, 'the batch is the answer'
    shown = capsys.readouterr()
    assert 'batch 64 on' in shown.out
    (line,) = shown.err.splitlines()
    assert says(line, 'batch_size=64,', '3,600')
    assert run(*argv, '--config.batch_size=16') == 2
    shown = capsys.readouterr()
    assert 'batch 16 on' in shown.out and shown.err.startswith('error: train refuses')


@pytest.mark.parametrize(
    ('bounds', 'tried', 'taken', 'advice'),
    [
        ({1: 10, 2: 7, 4: 5, 8: 5}, 4, 4, ('step.accum_steps=4', '50%')),
        ({1: 10, 2: 9.5, 4: 9.6}, 3, 1, ('5%', '2')),
        ({1: 10, 2: 10}, 2, 1, ('lowers', 'bound')),
        ({1: None, 2: 9, 4: 9}, 3, 2, 'step.accum_steps=2'),
        ({1: None, 2: 9, 4: 5, 8: 5}, 4, 4, 'step.accum_steps=4 pays'),
    ],
)
def test_microbatches_are_taken_where_they_pay(bounds, tried, taken, advice, monkeypatch, capsys):
    """`bounds`: seconds of a step by microbatches; None where it does not fit."""
    asked = []

    def compile_step(config, slice_, **options):
        asked.append(config.step.accum_steps)
        seconds = bounds[asked[-1]]
        report = preflight.Report(
            *('v5e:2x2', 4, 'train', config.batch_size, {}, 10, {}, 2.0**34, 2.0**34, 300, 197e12),
            compile_seconds=1.0,
            fits=seconds is not None,
            bound=seconds or 0,
        )
        return [report], preflight.RunEstimate(20, seconds or 0, 4)

    monkeypatch.setattr(preflight, 'preflight', compile_step)
    monkeypatch.setattr(topology, 'require_compiler', lambda _: None)
    argv = ('--config', DIGITS, '--topology', 'v5e:2x2', '--config.batch_size=256')
    assert run(*argv, '--accum', 'fit') == 0
    printed = capsys.readouterr().out
    assert mentions(printed, advice)
    assert asked == [2**i for i in range(tried)], 'until the bound falls no more, each once'
    (line,) = [line for line in printed.splitlines() if line.startswith(f'{taken} ')]
    assert line.split()[1] == str(64 // taken)
    (line,) = [line for line in printed.splitlines() if line.startswith('at least ')]
    assert line.split()[2] == f'{1e3 * bounds[taken]:,.0f}', 'the step that is taken'


def test_where_no_microbatches_fit_or_can_be_is_one_line(fake_compiler):
    slice_ = ('--topology', 'v5e:2x2', '--accum', 'fit')
    with pytest.raises(UserError, match=r'number.*microbatches'):
        command.main(['--config', DIGITS, *slice_, '--config.batch_size=128'])
    assert [r['config']['step']['accum_steps'] for r in fake_compiler] == [1, 2, 4]
    with pytest.raises(UserError, match=r'batch_size=66: .* 4 chips'):
        command.main(['--config', DIGITS, *slice_, '--config.batch_size=66'])
    with pytest.raises(UserError, match='leave out --eval'):
        command.main(['--config', DIGITS, *slice_, '--eval'])


def test_the_costliest_parts_are_shown_before_copies_that_run_meanwhile(
    fake_compiler, monkeypatch, capsys
):
    parts = [preflight.Cost(f'mlp_{i}', 1e-3, 1, 1) for i in range(20)]
    copies = preflight.Cost(preflight.ASYNC_COPIES, 1e-2, 0, 1)
    monkeypatch.setattr(preflight, 'costs_of', lambda *_: [copies, *parts])
    assert run('--config', DIGITS, '--topology', 'v5e:2x2') == 0
    shown = re.findall(f'mlp_.*|{preflight.ASYNC_COPIES}.*', capsys.readouterr().out)
    assert [line.split()[0] for line in shown[:-1]] == [cost.path for cost in parts[:12]]
    assert shown[-1].startswith(preflight.ASYNC_COPIES)


def test_asynchronous_copies_do_not_count():
    parts = [
        roofline.Operation('tail', 'bitcast', 0, 0, 1),
        roofline.Operation('mlp', 'fusion', 197 * 10**9, 8, 1),
        roofline.Operation('mlp', 'copy-start', 0, 819 * 10**7, 1, asynchronous=True),
    ]
    costs = preflight.costs_of(parts, topology.parse_topology('v5e:2x2'))
    assert [cost.path for cost in costs] == ['mlp', 'tail', preflight.ASYNC_COPIES]
    assert [cost.seconds for cost in costs] == pytest.approx([1e-3, 0, 1e-2])


def test_the_data_rate_of_a_host_is_shown_with_its_cores(fake_compiler, capsys, monkeypatch):
    monkeypatch.setattr(pipeline, 'SECONDS', 0.05)
    argv = ('--config', DIGITS, '--topology', 'v5litepod-16', '--data-rate', '--mfu', '1e-6')
    assert run(*argv, '--json') == 0
    record = json.loads(capsys.readouterr().out)
    seconds, json_record = record['run']['seconds'], record['data_rate']
    assert json_record['hosts'] == 4
    bound, expected = json_record['needs']
    rows = record['steps'][0]['rows']
    assert bound['per_host'] == pytest.approx(rows / seconds / 4)
    assert expected['per_host'] == pytest.approx(rows * 16 * 197e12 * 1e-6 / 300 / 4)
    assert expected['mfu'] == 1e-6
    assert bound['cores'] == -(-bound['per_host'] // json_record['per_core_per_sec'])
    assert run(*argv) == 0
    printed = capsys.readouterr().out
    assert mentions(printed, 'v5e:4x4', '4 hosts', '4 chips')
    assert run(*argv[:-1], '1') == 0
    printed = capsys.readouterr().out
    assert 'at the bound' in printed and 'at the given' not in printed, 'no run is that fast'


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--data-rate', '--eval'], '--data-rate'),
        (['--mfu', '0'], '--mfu.*0'),
        (['--data-rate', '--config.data.source=folder:/nowhere'], 'folder:/nowhere'),
    ],
)
def test_a_data_rate_that_cannot_be_is_one_line(fake_compiler, flags, message):
    with pytest.raises(UserError, match=message) as error:
        command.main(['--config', DIGITS, '--topology', 'v5e:2x2', *flags])
    assert '\n' not in str(error.value)
    assert not fake_compiler, 'before minutes of compiling'


def test_hosts_of_a_slice():
    hosts = {'v5litepod-8': 1, 'v5litepod-16': 4, 'v6e-8': 1, 'v4-8': 1, 'v4-32': 4, 'v5e:1x1': 1}
    assert {name: topology.parse_topology(name).hosts for name in hosts} == hosts


def test_a_picture_of_it(fake_compiler, tmp_path, capsys):
    out = tmp_path / 'costs.png'
    assert run('--config', DIGITS, '--topology', 'v5e:2x2', '--out', str(out)) == 0
    assert out.read_bytes().startswith(b'\x89PNG')


def test_every_run_of_a_sweep_is_priced(fake_compiler, capsys, tmp_path):
    sweep = tmp_path / 'sweep.py'
    sweep.write_text(
        'from vit_jax.sweeps.space import Sweep, grid\n'
        'def get_sweep(arg=None):\n'
        f'    return Sweep({DIGITS!r}, "test/loss", points=grid({{"batch_size": [32, 128]}}))\n'
    )
    argv = ('--sweep', str(sweep), '--topology', 'v5e:2x2', '--price', '3')
    assert run(*argv) == EXIT_FAILED
    printed = capsys.readouterr().out
    assert '…' not in printed, 'nothing is cut off where there is no terminal'
    fits, not_, total = printed.splitlines()[-3:]
    assert fits.split()[:3] == ['batch_size=32', 'yes', '3.81e-06']
    assert not_.split()[:3] == ['batch_size=128', 'no', '32']
    assert total.split()[-2:] == fits.split()[-2:]


def test_a_run_of_a_sweep_that_is_refused_loses_no_other(fake_compiler, capsys, tmp_path):
    sweep = tmp_path / 'sweep.py'
    sweep.write_text(
        'from vit_jax.sweeps.space import Sweep, grid\n'
        'def get_sweep(arg=None):\n'
        f'    return Sweep({DIGITS!r}, "test/loss", points=grid({{"batch_size": [16, 32]}}))\n'
    )
    assert run('--sweep', str(sweep), '--topology', 'v5e:2x2') == 2
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()[-3:-1]] == [
        'batch_size=16',
        'batch_size=32',
    ]
    assert mentions(shown.err, '1 of 2', 'batch_size=16')


def test_nothing_is_rented_for_what_does_not_fit(fake_compiler, capsys):
    argv = ['sky', '--tpu', 'v5litepod-4', '--preflight', '--dry-run', '--', 'train', '--workdir']
    config = ['gs://bucket/run', '--config', DIGITS, '--config.batch_size=128']
    with pytest.raises(UserError, match=r'fit.*v5litepod-4'):
        launch.main([*argv, *config])
    capsys.readouterr()
    assert launch.main([*argv, *config[:-1]]) == 0
    printed = capsys.readouterr()
    assert 'fits: ' in printed.err
    assert 'GiB' not in printed.out, 'that is the job alone'
    assert 'v5litepod-4' in printed.out


def test_a_mistake_is_one_line(fake_compiler):
    with pytest.raises(UserError, match='one of CONFIG'):
        command.main(['--topology', 'v5e:2x2'])
    for argv in (['--batch-size', 'fit'], ['--accum', 'fit'], ['--out', 'costs.png']):
        with pytest.raises(UserError, match='--sweep'):
            command.main(['--sweep', 'sweep.py', '--topology', 'v5e:2x2', *argv])


@pytest.mark.parametrize(
    ('message', 'needed'),
    [
        ('memory space hbm. Used 25.80G of 15.75G hbm. Exceeded hbm capacity by 10G', 25.8 * 2**30),
        ('for HLO temporaries (657.54G) exceeds available HBM (15.75G).', 657.54 * 2**30 + 7),
    ],
)
def test_both_messages_of_the_compiler_say_how_much_memory_there_is(message, needed):
    assert compile_for.overflow(message, state=7) == pytest.approx((needed, 15.75 * 2**30))
    assert compile_for.overflow('INTERNAL: Used all of it', state=7) is None


class CopyingTask(classify.Task):
    snapshot = Snapshot('teacher', first=1, every=0, method='__call__', omitted='^$')


def test_a_step_keeps_the_name_by_which_the_compiler_writes_it():
    train = make_train_step(None, CopyingTask(), optax.sgd(0.1), Step(ema_decay=0.9, max_skips=2))
    (pattern,) = re.findall(r'module_re=(\S+)', compile_for.FLAGS)
    for step in (
        train,
        make_eval_step(None, CopyingTask()),
        make_predict_step(None, CopyingTask()),
    ):
        assert re.fullmatch(pattern, step.__name__)


@with_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ('slice_', 'override'),
    [
        ('v5e:2x2', 'batch_size=64'),
        ('v4:2x2x4', 'parallel.fsdp=16'),
        ('2xv5e:2x2', 'step.accum_steps=2'),
    ],
)
def test_a_step_is_compiled_for_tpus(slice_, override):
    config = load.load(DIGITS, [override, 'parallel.min_split_size=64'])
    (report,), planned = preflight.preflight(
        config, topology.parse_topology(slice_), ahead_of_time.PROGRAM
    )
    assert report.fits
    assert planned.steps == 20
    # First layers have no gradient of their inputs, and XLA leaves out what is not used.
    assert 0.7 < report.flops * report.chips / report.model_flops < 1.1
    assert report.memory['optimizer'] >= 1.5 * report.memory['parameters']
    kinds = {(row.kind, row.axis) for row in report.exchanges}
    if override.startswith('parallel'):
        assert ('all-gather', 'fsdp') in kinds
        assert report.memory['parameters'] < 17418 * 4 * 4  # tiles of small arrays are padding
    else:
        assert ('all-reduce', 'data') in kinds
        assert all(axis == 'data' for _, axis in kinds), 'nothing else crosses'
    if slice_.startswith('2x'):
        # Each chip sends a quarter of the gradients, once a step, and a few metrics.
        assert 1 <= report.crossing.host_bytes / (4 * report.parameters) < 1.5, 'and padding'


@with_gpu_compiler
@pytest.mark.slow
def test_a_step_is_compiled_for_gpus():
    overrides = ['model.dtype=bfloat16', 'parallel.fsdp=2', 'parallel.min_split_size=64']
    config = load.load(DIGITS, overrides)
    (report,), planned = preflight.preflight(
        config, topology.parse_topology('2xh100:2'), ahead_of_time.PROGRAM
    )
    assert report.fits and not report.rematerialized
    assert (planned.steps, planned.chips) == (20, 4)
    assert 0.7 < report.flops * report.chips / report.model_flops < 1.3
    assert report.memory['optimizer'] >= 1.5 * report.memory['parameters']
    kinds = {(row.kind, row.axis) for row in report.exchanges}
    assert {('all-gather', 'fsdp'), ('all-reduce', 'data')} <= kinds
    # A GPU sends the gradients of its half of the parameters, in bfloat16, to the other host.
    assert 0.5 < report.crossing.host_bytes / (2 * report.parameters) < 2


@with_gpu_compiler
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(('attention', 'tokens'), [('auto', {196}), ('xla', {196, 200})])
def test_on_gpus_196_tokens_need_no_copies_to_200(attention, tokens):
    """For its own matmuls XLA pads them; cuDNN takes them as they are, in the form that qkv has."""
    overrides = [f'model.attention={attention}', 'model.depth=1', 'batch_size=8']
    config = load.load('experiments/vit/imagenet2012.py:fast', overrides)
    request = {'config': config.to_dict(), 'topology': 'h100:1', 'step': 'train', 'kind': -1}
    request |= {'examples': None, 'image_size': None}
    module = hlo.parse_module(compile_for.compile_step(request, ahead_of_time.PROGRAM).module)
    copies = [op for computation in module.computations.values() for op in computation]
    sides = {side for op in copies for array in op.arrays for side in array.shape}
    assert {side for side in sides if 196 <= side < 224} == tokens
    fused = [op for op in module.entry if op.target.startswith('__cudnn$fmha')]
    assert len(fused) == (2 if attention == 'auto' else 0)
    arguments = {module.entry[name].opcode for op in fused for name in op.operands}
    assert arguments <= {'bitcast', 'get-tuple-element'}


def test_jax_asks_for_the_version_of_cudnn_before_it_lowers_attention():
    """Until this fails, the compiling process needs the package that `compile_for` writes."""
    from jax._src.cudnn import fused_attention_stablehlo
    from jax._src.lib import cuda_versions

    if cuda_versions is not None:
        pytest.skip('the plugin of real GPUs is installed')
    with pytest.raises(RuntimeError, match='cuDNN'):
        fused_attention_stablehlo.check_cudnn_version()


@with_compiler
@pytest.mark.slow
def test_what_is_wrong_in_the_other_process_is_told_here():
    config = load.load(DIGITS, ['parallel.fsdp=3'])
    with pytest.raises(UserError, match='must divide the 4 devices'):
        preflight.preflight(config, topology.parse_topology('v5e:2x2'), ahead_of_time.PROGRAM)


TPU_PAGE, RECIPES_PAGE = (
    (ROOT / 'docs' / f'{name}.md').read_text() for name in ('tpu', 'tpu_recipes')
)
# {command: output on the page}
ANSWERS = dict(
    re.findall(r'^\| `(--[^`]+ --topology [^`]+)` \| ([^|]+) \|', RECIPES_PAGE, re.MULTILINE)
)
PRINTED = {line.partition(' ')[2]: '' for line in commands_in(TPU_PAGE) if 'preflight' in line}


@with_compiler
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)  # some compile a dozen steps, of a minute each on a quiet machine
@pytest.mark.parametrize('line', PRINTED | ANSWERS)
def test_commands_of_the_page_run_as_they_are_printed(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'experiments').symlink_to(ROOT / 'experiments')
    answer = (PRINTED | ANSWERS)[line]
    # The sweep of the paper has twelve runs.
    argv = shlex.split(line.replace('vit_data_size.py:vit', 'vit_data_size.py:smoke'))
    assert run(*argv) == (EXIT_FAILED if 'exit code 1' in answer else 0)
    shown = capsys.readouterr().out
    if memory := re.match(r'[\d.]+ of [\d.]+ GiB', answer):
        assert memory[0] in shown
    assert (tmp_path / 'costs.png').exists() == ('a picture' in answer)


@pytest.mark.slow
def test_a_cooldown_longer_than_the_run_is_no_part_of_the_step(one_device):
    """It is what `train` refuses; what does not depend on it is refused here."""
    config = load.load(LINEAR, ['total=20 steps', 'optim.schedule.cooldown=100'])
    steps, refusal = ahead_of_time.program(cost.data_facts(config), jax.devices()[:1])
    assert 'cooldown of 100' in refusal and '20 steps' in refusal
    assert steps.abstract_state.step.shape == ()
    config = load.load(LINEAR, ['optim.schedule.name=stair'])
    with pytest.raises(UserError, match='stair'):
        ahead_of_time.program(cost.data_facts(config), jax.devices()[:1])


@pytest.mark.slow
def test_the_compiler_is_loaded_by_nobody_else():
    # JAX itself imports the package, where it is installed.
    code = 'import sys, jax; before = "libtpu" in sys.modules; '
    code += 'import vit_jax.commands.preflight, vit_jax.profiling.preflight; '
    code += 'assert ("libtpu" in sys.modules) == before'
    subprocess.run([sys.executable, '-c', code], check=True)
