"""The best learning rate and batch size over sizes: known laws are recovered, others refused."""

from __future__ import annotations

import csv
import itertools
import json

import numpy as np
import pytest
from helpers.messages import says

from vit_jax import __main__ as cli
from vit_jax.errors import UserError
from vit_jax.scaling import tuned

# Li et al. 2025, arXiv:2503.04715: in parameters, and tokens.
STEP_LAW = {'lr': (1.79, -0.713, 0.307), 'batch': (0.58, 0.0, 0.571)}
# Bi et al. 2024, arXiv:2401.02954: in FLOPs.
DEEPSEEK = {'lr': (0.3118, -0.125), 'batch': (0.292, 0.3271)}
SIZES = tuple(itertools.product((6e7, 2e8, 4e8, 1e9), (4e9, 2e10, 1e11)))
STEPS = 2.0 ** np.arange(-2, 3)


def best(law, sizes):
    scale, *exponents = law
    return scale * np.prod(np.asarray(sizes) ** np.array(exponents))


def sweep(laws=STEP_LAW, sizes=SIZES, noise=0.001, seed=0, steps=STEPS, off=0.0):
    """A grid around the best values of each setting, moved by chance; `off` bends the law."""
    rng, rows = np.random.default_rng(seed), []
    for size in sizes:
        middle = [best(law, size) * np.exp(off * rng.standard_normal()) for law in laws.values()]
        start = np.exp(rng.uniform(-0.3, 0.3, len(laws)))
        for grid in itertools.product(steps, repeat=len(laws)):
            x = np.log(start * grid)
            bowl = 0.02 * (x**2).sum() + 0.01 * x.prod() * (len(x) > 1)
            loss = (2 + size[0] ** -0.1) * np.exp(bowl + noise * rng.standard_normal())
            values = dict(zip(laws, np.exp(np.log(middle) + x), strict=True))
            rows.append({**dict(zip('ND', size, strict=False)), **values, 'loss': loss})
    return [{name: repr(float(value)) for name, value in row.items()} for row in rows]


@pytest.mark.parametrize(
    ('laws', 'over', 'sizes', 'far'),
    [
        (STEP_LAW, ('N', 'D'), SIZES, (7e9, 2e12)),
        (DEEPSEEK, ('N',), [(c,) for c in np.geomspace(1e17, 2e19, 8)], (3e20,)),
        ({'lr': STEP_LAW['lr']}, ('N', 'D'), SIZES, (7e9, 2e12)),
    ],
)
def test_published_laws_are_recovered(laws, over, sizes, far):
    law = tuned.fit(sweep(laws, sizes), tuple(laws), over, 'loss')
    assert law.settings == len(sizes)
    for at, (name, (_, *exponents)) in enumerate(laws.items()):
        for size, exponent in enumerate(exponents):
            assert law.exponent(at, size)[0] == pytest.approx(exponent, abs=0.02), name
        value, (low, high) = law.best(far)[at]
        assert value == pytest.approx(best(laws[name], far), rel=0.1)
        assert low < value < high < 1.5 * low
    assert tuned.from_json(json.loads(json.dumps(law.to_json()))).best(far) == law.best(far)
    (value, band) = law.best([1e4 * n for n in law.largest])[0]
    assert value > 0
    assert band == (), 'too far'


@pytest.mark.slow
@pytest.mark.parametrize('off', [0.0, 0.3])
def test_bands_hold_the_truth(off):
    held = []
    for seed in range(60):
        rows = sweep(noise=0.005, seed=seed, off=off)
        law = tuned.fit(rows, tuple(STEP_LAW), ('N', 'D'), 'loss')
        far = (7e9, 1e12)
        for at, (name, (_, (low, high))) in enumerate(zip(STEP_LAW, law.best(far), strict=True)):
            held.append(low <= best(STEP_LAW[name], far) <= high)
            for size, exponent in enumerate(STEP_LAW[name][1:]):
                (low, high) = law.exponent(at, size)[1]
                held.append(low <= exponent <= high)
    assert 0.85 <= np.mean(held) <= 0.97


def test_one_run_for_each_setting_is_a_table_of_best_values():
    rows = [
        dict(N=str(n), D=str(d), lr=str(best(STEP_LAW['lr'], (n, d))), loss='2') for n, d in SIZES
    ]
    law = tuned.fit(rows, ['lr'], ['N', 'D'], 'loss')
    assert [law.exponent(0, size)[0] for size in (0, 1)] == pytest.approx([-0.713, 0.307])
    assert law.best((1e9, 1e11))[0][0] == pytest.approx(best(STEP_LAW['lr'], (1e9, 1e11)))


def test_settings_whose_best_is_at_an_end_are_left_out():
    rows = sweep({'lr': STEP_LAW['lr']})
    first = [row for row in rows if (row['N'], row['D']) == (rows[0]['N'], rows[0]['D'])]
    first.sort(key=lambda row: float(row['loss']))
    cut = [row for row in rows if row not in first or float(row['lr']) >= float(first[0]['lr'])]
    law = tuned.fit(cut, ['lr'], ['N', 'D'], 'loss')
    assert law.settings == len(SIZES) - 1
    assert any('1 of 12 settings' in note and 'lr' in note for note in law.notes)


@pytest.mark.parametrize(
    ('rows', 'over', 'words'),
    [
        (sweep(sizes=SIZES[:4]), ('N', 'D'), 'needs 5'),
        (sweep(sizes=[(n, 20 * n) for n in np.geomspace(1e7, 1e9, 8)]), ('N', 'D'), '--over D'),
        (sweep(steps=STEPS[:2]), ('N', 'D'), 'needs 5'),
        (sweep(noise=1.0), ('N', 'D'), 'lr'),
        (sweep(), ('N', 'tokens'), "'tokens'"),
    ],
)
def test_what_is_not_identified_is_refused(rows, over, words):
    with pytest.raises(UserError, match=words):
        tuned.fit(rows, ('lr', 'batch'), over, 'loss')


def write(rows, path):
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_the_command_and_plan(tmp_path, capsys, repo):
    names = {'N': 'parameters', 'D': 'examples_seen', 'lr': 'config.optim.lr'}
    rows = sweep({'lr': STEP_LAW['lr']}, [(n / 1e5, d / 1e7) for n, d in SIZES])
    table = write(
        [{names.get(k, k): v for k, v in row.items()} for row in rows], tmp_path / 'a.csv'
    )
    argv = ['scaling', 'tuned', '--csv', table, '--y', 'loss', '--at', '1e4,1e5']
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert '(parameters / ' in text
    assert 'at parameters = 1e+04, examples_seen = 1e+05: best config.optim.lr' in text
    assert cli.main([*argv, '--json']) == 0
    stored = capsys.readouterr().out
    assert json.loads(stored)['at']['best']['config.optim.lr']['band']
    (tmp_path / 'law.json').write_text(stored)
    plan = ['scaling', 'plan', f'{repo}/tests/helpers/isoflop_file.py']
    assert cli.main([*plan, '--tuned', str(tmp_path / 'law.json')]) == 0
    assert 'best' in capsys.readouterr().out
    for flags, words in (
        (['--tuned', table], ['--tuned', 'law']),
        (['--tuned', 'none.json'], ['none.json']),
    ):
        assert cli.main([*plan, *flags]) == 2
        assert says(capsys.readouterr().err, *words)
    for flags in (['--at', '1e4'], ['--tuned', 'lr,lr'], ['--over', '']):
        assert cli.main([*argv, *flags]) == 2
        assert says(capsys.readouterr().err, flags[0])
