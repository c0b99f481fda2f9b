"""`train --profile` traces the steps that it is asked for, and tells where their time went."""

import gzip
import json
import re

import pytest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.commands.train import profile_steps
from vit_jax.errors import UserError
from vit_jax.profiling import trace
from vit_jax.trainer.guards import Window


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
def test_a_trace_of_the_steps_and_a_table_of_their_time(repo, tmp_path, capsys):
    words = ['train', '--config', f'{repo}/tests/helpers/linear.py', '--workdir', str(tmp_path)]
    words += ['--config.total=6 steps', '--config.every.eval=', '--profile']
    assert main([*words, '4:5', '--stop-at', '5']) == 75
    said = capsys.readouterr().out
    assert mentions(said, 'profile', '4', '5')
    shares = re.findall(
        r'^  (waiting for data|starting the step|waiting for the devices|the rest)'
        r'.* ([\d.]+)%$',
        said,
        re.MULTILINE,
    )
    assert len(shares) == 4
    assert sum(float(share) for _, share in shares) == pytest.approx(100, abs=0.5)
    (file,) = tmp_path.glob('profile/**/perfetto_trace.json.gz')
    events = json.loads(gzip.decompress(file.read_bytes()))['traceEvents']
    started = [e for e in events if e.get('name') == 'train']
    assert [int(e['args']['step_num']) for e in started] == [4, 5]
    (file,) = tmp_path.glob('profile/**/*.xplane.pb')
    devices = trace.read_trace(file)
    assert devices.busy > 0
    assert sum(devices.ops.values()) >= devices.busy * (1 - 1e-6)  # sums of floats
    assert any(name in said for name in list(devices.ops)[:3])
    assert main([*words, '5:7']) == 2
    assert mentions(capsys.readouterr().err, 'steps', '6', '5', '7')


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
def test_a_trace_that_cannot_be_read_ends_no_run(repo, tmp_path, monkeypatch, capsys):
    (tmp_path / 'sitecustomize.py').write_text('import os\nos.abort()\n')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    words = ['train', '--config', f'{repo}/tests/helpers/linear.py', '--config.total=4']
    assert main([*words, '--workdir', str(tmp_path / 'run'), '--profile', '1']) == 0
    said = capsys.readouterr().out
    assert re.search(r'cannot read .*\.xplane\.pb \(exit code -6\)', said)
    assert mentions(said, 'profile', '3') and not mentions(said, 'device', 'busy')
    assert list(tmp_path.glob('run/profile/**/*.xplane.pb'))


def test_steps_as_they_are_given():
    assert profile_steps('5') == (5, None)
    assert profile_steps('10:15') == (6, 10)
    for text in ('0', '5:4', '1:', 'x', '-3', '0:2'):
        with pytest.raises(UserError, match=r'number.*steps'):
            profile_steps(text)
    assert list(Window(3).steps(10, 15)) == [13, 14, 15], 'the first two are left out'
    with pytest.raises(UserError, match=r'steps.*11.*15.*13.*16'):
        Window(4).steps(10, 15)
    with pytest.raises(UserError, match='not 10 to 12'):
        Window(3, 10).steps(10, 15)


def test_time_that_is_covered_counts_once():
    assert trace.union_length([(0, 2), (1, 3), (5, 6), (5.2, 5.5)]) == 4
    assert trace.union_length([]) == 0


@pytest.mark.parametrize(
    ('name', 'kind'),
    [
        ('multiply_add_fusion.12', 'multiply_add_fusion'),
        ('%dot.3.clone = f32[2,2]{1,0} dot(...)', 'dot'),
        ('all-reduce', 'all-reduce'),
        ('fusion.7.remat2', 'fusion'),
    ],
)
def test_operations_of_a_kind(name, kind):
    assert trace.kind(name) == kind
