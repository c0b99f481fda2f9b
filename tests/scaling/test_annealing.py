"""Laws of a loss curve under its schedule predict ends of synthetic runs from their starts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.messages import says

from vit_jax import __main__ as cli
from vit_jax.errors import UserError
from vit_jax.scaling import annealing
from vit_jax.scaling.annealing import LossCurve

STEPS = 400


def rates(shape, steps=STEPS, warmup=20):
    t = np.arange(steps)
    rising = np.minimum((t + 1) / warmup, 1)
    if shape == 'cosine':
        return rising * (1 + np.cos(np.pi * t / steps)) / 2
    if shape == 'wsd':
        return rising * np.minimum((steps - t) / (0.2 * steps), 1)
    return rising


def of_the_papers(law, eta):
    """The sums as in equation 1 of each paper, term by term."""
    loss, s1 = np.empty(len(eta)), np.cumsum(eta)
    falls = np.maximum(eta[:-1] - eta[1:], 0)  # before step k + 1
    for step in range(len(eta)):
        effect = 0.0
        for k in range(step):
            if law == 'annealing':
                waited = step - k  # steps since the fall, this one included
                effect += falls[k] * sum(0.96 ** np.arange(waited)) * 0.04
            else:
                effect += falls[k] * (1 - (1 + 0.2 * (s1[step] - s1[k + 1])) ** -0.6)
        loss[step] = 1.2 + 2.0 * s1[step] ** -0.4 - 0.3 * effect
    return loss


def curve(law, shape, noise=0.0, seed=0, steps=STEPS):
    eta = rates(shape, steps)
    at = np.arange(8, steps + 1, 8)
    rng = np.random.default_rng(seed)
    return LossCurve(
        eta, at, of_the_papers(law, eta)[at - 1] * np.exp(noise * rng.standard_normal(len(at)))
    )


@pytest.fixture(scope='module')
def exact():
    return {
        (law, shape): curve(law, shape) for law in annealing.LAWS for shape in ('wsd', 'cosine')
    }


@pytest.mark.slow
@pytest.mark.parametrize('law', annealing.LAWS)
def test_a_law_fits_its_own_curves(exact, law):
    found = annealing.fit([exact[law, 'wsd'], exact[law, 'cosine']], law)
    assert found.error < 0.003
    if law == 'annealing':
        assert found.scales[0] == pytest.approx(1.2, rel=0.02)
        assert np.exp(found.shape) == pytest.approx([0.4, -1 / np.log(0.96)], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize('law', annealing.LAWS)
def test_ends_are_predicted_from_first_halves(exact, law):
    cosine, wsd = exact[law, 'cosine'], exact[law, 'wsd']
    alone = annealing.predict_end(cosine.until(STEPS // 2), law=law, bootstrap=0)
    assert alone.value == pytest.approx(cosine.loss[-1], rel=0.04)
    assert alone.band[0] < cosine.loss[-1] < alone.band[1]
    both = annealing.predict_end(wsd.until(STEPS // 2), [cosine], law, bootstrap=0)
    assert both.value == pytest.approx(wsd.loss[-1], rel=0.01)
    assert both.share == pytest.approx(wsd.rates[: STEPS // 2].sum() / wsd.rates.sum())


def test_bands_hold_the_end(exact):
    eta, held = rates('wsd'), []
    truth = exact['annealing', 'wsd'].loss[-1]
    rng = np.random.default_rng(0)
    other, known = exact['annealing', 'cosine'], exact['annealing', 'wsd'].until(STEPS // 2)
    for _ in range(12):
        noisy = [
            LossCurve(c.rates, c.steps, c.loss * np.exp(0.01 * rng.standard_normal(len(c.steps))))
            for c in (known, other)
        ]
        low, high = annealing.predict_end(noisy[0], noisy[1:], bootstrap=4).band
        held.append(low < truth < high)
        assert high < 1.3 * low
    assert len(eta) == STEPS
    assert np.mean(held) >= 0.75


def test_what_is_not_identified_is_refused(exact):
    known = exact['annealing', 'wsd'].until(STEPS // 2)
    with pytest.raises(UserError, match='99%'):
        annealing.predict_end(known)
    with pytest.raises(UserError, match=str(annealing.FEWEST)):
        annealing.predict_end(known.until(STEPS // 10))


@pytest.mark.slow
def test_the_command(tmp_path, capsys, smoke_run):
    folder = tmp_path / 'run'
    folder.mkdir()
    config = json.loads((smoke_run / 'config.json').read_text())
    config['total'] = f'{STEPS} steps'
    config['optim']['schedule'] = {'name': 'cosine', 'warmup': '20 steps'}
    (folder / 'config.json').write_text(json.dumps(config))
    noisy = curve('annealing', 'cosine', 0.002)
    lines = [
        json.dumps({'step': int(step), 'train/loss': loss})
        for step, loss in zip(noisy.steps, noisy.loss, strict=True)
    ]
    (folder / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
    assert cli.main(['scaling', 'curve', str(folder), '--until', '0.5']) == 0
    text = capsys.readouterr().out
    assert 'train/loss at step 396:' in text
    assert 'measured:' in text
    assert (
        cli.main(
            ['scaling', 'curve', str(folder), '--until', '0.5', '--law', 'annealing', '--json']
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found['band'][0] < found['measured'] < found['band'][1]
    for flags, words in (
        (['--metric', 'val/los'], ['val/los', 'train/loss']),
        (['--until', '2'], ['--until']),
        ([str(tmp_path)], ['config.json']),
    ):
        assert cli.main(['scaling', 'curve', str(folder), *flags]) == 2
        assert says(capsys.readouterr().err, *words)
