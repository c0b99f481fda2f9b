"""Manifests: digests, epochs and choices that a reviewer would question; pages of both kinds."""

from __future__ import annotations

import json

import pytest
from helpers.messages import mentions

from vit_jax.scaling import manifest, pages, runs


def make_row(folder, parameters=1000, examples=5000, size=1000, lr=1e-3, **optim):
    folder.mkdir()
    schedule = {'name': 'cosine', 'warmup': '10%'}
    config = {'seed': 0, 'optim': {'name': 'adamw', 'lr': lr, 'schedule': schedule} | optim}
    (folder / 'config.json').write_text(json.dumps(config))
    row = {
        'run': str(folder),
        'parameters': parameters,
        'examples_seen': examples,
        'data_size': size,
    }
    return row | {'steps': 10, 'batch_size': 500, 'hardware': None}


def test_an_entry_identifies_a_run(tmp_path):
    (entry,) = manifest.entries([make_row(tmp_path / 'a')])
    expected = {'epochs': 5.0, 'lr': 1e-3, 'warmup': '10%', 'schedule': 'cosine', 'seed': 0}
    assert {name: entry[name] for name in expected} == expected
    assert (entry['parametrization'], len(entry['digest'])) == ('standard', 12)
    config = json.loads((tmp_path / 'a' / 'config.json').read_text())
    assert entry['digest'] == runs.digest(dict(reversed(config.items())))
    assert entry['digest'] != runs.digest(config | {'seed': 1})
    header, row = manifest.make_table([entry])
    assert header[:3] == ['run', 'digest', 'parameters'] and 'hardware' not in header
    assert row[header.index('epochs')] == '5'


@pytest.mark.parametrize(
    ('cooldown', 'schedule', 'share'),
    [
        ('2 steps', 'constant with cooldown', '20%'),
        ('15%', 'constant with cooldown', '15%'),
        ('0 steps', 'constant', None),
    ],
)
def test_an_entry_names_the_cooldown(tmp_path, cooldown, schedule, share):
    row = make_row(tmp_path / 'a', schedule={'name': 'constant', 'cooldown': cooldown})
    (entry,) = manifest.entries([row])
    assert (entry['schedule'], entry['cooldown'], entry['data_size']) == (schedule, share, 1000)


def diagnostics(tmp_path, *options):
    rows = [make_row(tmp_path / str(i), **row_options) for i, row_options in enumerate(options)]
    return '; '.join(manifest.diagnostics(manifest.entries(rows)))


def test_one_rate_for_all_sizes_is_flagged(tmp_path):
    notes = diagnostics(tmp_path, {'parameters': 10}, {'parameters': 20})
    assert 'one learning rate, 0.001' in notes
    assert 'one warm-up, 10%' in notes
    assert mentions(notes, '5 epochs', '2', '4 times')
    assert '1 run(s)' in notes


def test_rates_that_were_tried(tmp_path):
    rates = [{'parameters': size, 'lr': lr} for size in (10, 20) for lr in (1e-3, 3e-3)]
    assert mentions(diagnostics(tmp_path, *rates), '2', '2 values', '2 sizes')


@pytest.mark.parametrize(
    ('options', 'text'),
    [
        ([{'lr': 1e-3}, {'parameters': 9, 'lr': 2e-3}], '2 of 2 have'),
        ([{}, {'parametrization': 'mup'}], ('parametrization', 'standard')),
        ([{'size': None}, {'examples': 7}], '1 of 2 runs'),
        ([{'lr': None}], '1 of 1 runs'),
    ],
)
def test_other_diagnostics(tmp_path, options, text):
    assert mentions(diagnostics(tmp_path, *options), text)


def test_a_page_is_the_same_in_both_formats():
    blocks = [
        pages.Heading('A < B', 1),
        pages.Text('see `scaling fit`'),
        pages.Lines(['one', 'two']),
        pages.TableBlock([['x', 'y'], ['a|b', '2']]),
        pages.Picture('p.png', 'curves'),
    ]
    assert pages.markdown(blocks) == (
        '# A < B\n\nsee `scaling fit`\n\n- one\n- two\n\n| x | y |\n| --- | --- |\n'
        '| a\\|b | 2 |\n\n![curves](p.png)\n'
    )
    page = pages.html_page(blocks, {'p.png': b'\x89PNG'})
    for part in (
        '<title>A &lt; B</title>',
        '<h1>A &lt; B</h1>',
        '<p>see <code>scaling fit</code></p>',
        '<li>two</li>',
        '<td>a|b</td>',
        'src="data:image/png;base64,iVBORw=="',
    ):
        assert part in page
