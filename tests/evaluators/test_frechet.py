"""Distances of features: numbers of torch-fidelity and scipy, and the evaluator around them."""

import json
import logging

import numpy as np
import pytest
import scipy.linalg
from helpers.messages import mentions

from vit_jax import __main__ as cli
from vit_jax.errors import UserError
from vit_jax.evaluators import frechet
from vit_jax.evaluators.base import OtherModel
from vit_jax.evaluators.frechet import Statistics, statistics
from vit_jax.inference.predict import other_model

REAL = np.random.default_rng(0).normal(size=(60, 8))
# The generator goes on, as it did for torch-fidelity.
MADE = np.random.default_rng(0).normal(size=(110, 8))[60:] * 1.3 + 0.4
IMAGES = np.random.default_rng(1).integers(0, 256, (12, 8, 8, 1), dtype=np.uint8)


def test_numbers_of_torch_fidelity():
    """Of release 0.4.0 for these features."""
    distance = frechet.frechet(statistics(REAL), statistics(MADE))
    assert distance == pytest.approx(2.4810308009250726, rel=1e-9)
    kernel = frechet.kernel_distance(REAL[:50], MADE, 3, 50, 0)  # every subset is the whole
    assert kernel == pytest.approx(0.7756402560012269, rel=1e-9)
    assert frechet.precision_and_recall(REAL, MADE, 3) == pytest.approx((0.6, 0.95), abs=1e-6)


@pytest.mark.parametrize('rows', [60, 5])
def test_the_root_is_that_of_scipy(rows):
    """With fewer rows than features the covariance is singular."""
    one, other = statistics(REAL[:rows]), statistics(MADE[:rows])
    root = scipy.linalg.sqrtm(one.covariance @ other.covariance).real
    shift = np.square(one.mean - other.mean).sum()
    expected = shift + np.trace(one.covariance + other.covariance - 2 * root)
    assert frechet.frechet(one, other) == pytest.approx(expected, rel=1e-5)


def test_a_set_is_at_distance_zero_and_a_shifted_one_at_the_square_of_the_shift():
    own = statistics(REAL)
    assert frechet.frechet(own, own) == pytest.approx(0, abs=1e-10)
    moved = Statistics(own.mean + np.array([3.0] + [0.0] * 7), own.covariance)
    assert frechet.frechet(own, moved) == pytest.approx(9)
    # N(0, 1) and N(0, 4): (2 - 1)^2
    assert frechet.frechet(*(Statistics(np.zeros(1), np.eye(1) * v) for v in (1, 4))) == 1


def test_the_kernel_distance_of_one_distribution_is_zero_on_average():
    rng = np.random.default_rng(2)
    found = [frechet.mmd(*rng.normal(size=(2, 40, 6))) for _ in range(300)]
    assert abs(np.mean(found)) < 3 * np.std(found) / np.sqrt(300)
    assert min(found) < 0


def test_subsets_are_of_the_seed():
    one, again, other = (frechet.kernel_distance(REAL, MADE, 5, 20, s) for s in (0, 0, 1))
    assert one == again != other


def test_precision_falls_with_samples_far_away_and_recall_with_images_left_out():
    near = REAL + 1e-3
    assert frechet.precision_and_recall(REAL, near, 3) == (1, 1)
    half = np.concatenate([near[:30], near[:30] + 100])
    assert frechet.precision_and_recall(REAL, half, 3)[0] == 0.5
    clusters = np.concatenate([REAL, REAL + 100])
    assert frechet.precision_and_recall(clusters, near, 3) == (1, 0.5)


def test_distances_are_computed_in_blocks(monkeypatch):
    whole = frechet.precision_and_recall(REAL, MADE, 3)
    monkeypatch.setattr(frechet, 'BLOCK', 7)
    assert frechet.precision_and_recall(REAL, MADE, 3) == whole


def read(path):
    """A model whose features are the first four pixels."""
    found = OtherModel(
        lambda images: {'features': images[:, 0, :4, 0].astype(np.float32)},
        ('features', 'probs'),
        'classify',
        path,
    )
    return found if path == FEATURES else found._replace(names=('samples',), task='generate')


FEATURES = 'runs/classifier'


def opened(features=FEATURES, **options):
    evaluator = frechet.Evaluator(features=features, **options)
    evaluator.read_models(read)
    return evaluator


def measured(evaluator, samples=IMAGES[::-1, None]):
    evaluator.start()
    for part in (slice(0, 5), slice(5, 12)):
        evaluator.update({'samples': samples[part], 'image': IMAGES[part]}, {})
    return evaluator.result()


def test_metrics_have_the_name_of_the_features():
    evaluator = opened(subset_size=12)
    assert (
        evaluator.names()
        == tuple(measured(evaluator))
        == (
            *('frechet_classifier', 'kernel_classifier'),
            *('precision_classifier', 'recall_classifier'),
        )
    )
    found = measured(evaluator)  # the same images in another order
    assert found['frechet_classifier'] == pytest.approx(0, abs=1e-6)
    assert found['precision_classifier'] == found['recall_classifier'] == 1
    two = np.stack([IMAGES, 255 - IMAGES], axis=1)
    assert measured(evaluator, two)['frechet_classifier'] > 100


@pytest.mark.parametrize(
    ('path', 'name'),
    [('runs/a/', 'a'), ('hub/ViT-B_16.npz', 'ViT_B_16'), ('runs/a/checkpoints/20', '20')],
)
def test_names(path, name):
    assert frechet.feature_name(path) == name


def test_it_says_what_too_few_images_mean(caplog):
    with caplog.at_level(logging.WARNING):
        evaluator = opened()
        measured(evaluator)
        assert not caplog.records
        evaluator.update({'samples': IMAGES[:4, None], 'image': IMAGES[:6]}, {})
        evaluator.result()
    (record,) = caplog.records
    assert mentions(record.getMessage(), '4 images', '4 features', '3')


def test_statistics_of_a_file_take_the_place_of_the_images(tmp_path):
    pixels = IMAGES[:, 0, :4, 0].astype(float)
    file = str(tmp_path / 'stats.npz')
    np.savez(file, mu=pixels.mean(0) + 2, sigma=np.cov(pixels, rowvar=False))
    found = measured(opened(reference=file))
    assert found == {'frechet_classifier': pytest.approx(16, rel=1e-5)}
    np.savez(file, mu=np.zeros(5), sigma=np.eye(5))
    with pytest.raises(UserError, match=r'reference has 5 .* 4'):
        measured(opened(reference=file))


def test_what_is_not_finite_makes_every_metric_nan(monkeypatch):
    evaluator = opened(subset_size=12)
    evaluator.update({'samples': IMAGES[:5, None], 'image': IMAGES[:5], 'finite': np.zeros(5)}, {})
    evaluator.update({'samples': IMAGES[5:, None], 'image': IMAGES[5:], 'finite': np.ones(7)}, {})
    lost = [evaluator.result()]
    assert np.isfinite([*measured(evaluator).values()]).all()
    monkeypatch.setattr(evaluator, '_extract', lambda images: np.full((len(images), 4), np.nan))
    for found in (*lost, measured(evaluator)):
        assert set(found) == set(evaluator.names()) and np.isnan(list(found.values())).all()


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match=r'neighbors=0.*1'):
        opened(neighbors=0)
    with pytest.raises(UserError, match="'generate'"):
        opened().update({'features': IMAGES}, {})
    with pytest.raises(UserError, match=r'reference .*No such file'):
        opened(reference='none.npz')
    np.savez(tmp_path / 'a.npz', mu=np.zeros(2))
    with pytest.raises(UserError, match=r'reference .*mu and sigma'):
        opened(reference=str(tmp_path / 'a.npz'))
    np.savez(tmp_path / 'a.npz', mu=np.zeros(2), sigma=np.eye(3))
    with pytest.raises(UserError, match=r'are \[2\] and \[3, 3\], not \[D\] and \[D D\]'):
        opened(reference=str(tmp_path / 'a.npz'))


def test_torchscript_is_called_as_nvidias_inception(tmp_path):
    torch = pytest.importorskip('torch')

    class Inception(torch.nn.Module):
        def forward(self, images, return_features: bool = False):
            assert return_features
            return images.float().mean((2, 3))

    file = tmp_path / 'inception-2015-12-05.pt'
    torch.jit.script(Inception()).save(str(file))
    extract, digest = frechet.torchscript(str(file))
    means = IMAGES.mean((1, 2)).repeat(3, axis=1)
    np.testing.assert_allclose(extract(IMAGES), means, rtol=1e-5)
    assert len(digest) == 64
    (tmp_path / 'b.pt').write_text('no model')
    with pytest.raises(UserError, match=r'b\.pt.*cannot be read'):
        opened(str(tmp_path / 'b.pt'))


@pytest.mark.slow
def test_a_run_is_measured_in_the_features_of_another(repo, capsys, one_device):
    """Eight samples of each of twenty images, in the 16 features of a classifier of digits."""
    golden = repo / 'tests' / 'golden'
    words = ['evaluate', '--workdir', str(golden / 'run_jit'), '--split', 'test[:20]', '--json']
    measure = f"frechet(features='{golden / 'run_digits'}', subset_size=20)"
    assert cli.main([*words, '--evaluator', measure]) == 0
    found = json.loads(capsys.readouterr().out)
    values = {key.partition('/')[2]: value for key, value in found.items() if '/' in key}
    assert values['frechet_run_digits'] > 0 and values['kernel_run_digits'] > 0
    assert 0 <= values['precision_run_digits'] <= 1


@pytest.mark.slow
def test_features_of_a_run_do_not_depend_on_other_images(repo):
    model = other_model(repo / 'tests' / 'golden' / 'run_digits')
    every = model.predict(IMAGES)['features']
    assert every.shape == (12, 16) and {'features', 'probs'} <= {*model.names}
    np.testing.assert_allclose(model.predict(IMAGES[3:5])['features'], every[3:5], atol=1e-5)
    other = other_model(repo / 'tests' / 'golden' / 'run_vit').digest
    assert len(model.digest) == 64 and model.digest != other


def test_a_model_without_features_is_refused():
    with pytest.raises(UserError, match=r"features .*'generate'"):
        opened('runs/jit')
