"""Linear probes and nearest neighbors of patches: against PyTorch, and on patches that tell all."""

import math
import pathlib
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.evaluators import patch_knn, patch_probe
from vit_jax.inference.load import open_model
from vit_jax.ops import linear_head
from vit_jax.ops.patch_maps import View
from vit_jax.ops.probe_protocol import Protocol
from vit_jax.trainer import measure

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
IMAGES, GRID, WIDTH, CLASSES, SIDE = 6, (3, 4), 5, 3, 8


class Source(list):
    title = 'a few'

    def annotations(self, index):
        return self[index]


def patches_and_truth(seed=0):
    rng = np.random.default_rng(seed)
    patches = rng.normal(1, 2, (IMAGES, *GRID, WIDTH)).astype(np.float32)
    size = tuple(SIDE * n for n in GRID)
    return patches, rng.integers(-1, CLASSES, (IMAGES, *size)).astype(np.int16)


def torch_head(head, protocol):
    """The same layers, and AdamW."""
    norm = torch.nn.BatchNorm2d(WIDTH) if protocol.norm else torch.nn.Identity()
    layer = torch.nn.Conv2d(WIDTH, head.kernel.shape[1], 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(head.kernel.T[..., None, None]))
        layer.bias.copy_(torch.tensor(head.bias))
    return torch.nn.Sequential(norm, layer)


def torch_depth(values, deepest):
    """DINOv2's normalization of bins, from its equations."""
    weights = torch.relu(values) + 0.1
    bins = torch.linspace(0.001, deepest, values.shape[1])
    return torch.einsum('bkhw,k->bhw', weights / weights.sum(1, keepdim=True), bins)[:, None]


def torch_sig_loss(predicted, truth, spread=True):
    error = torch.log(predicted + 0.001) - torch.log(truth + 0.001)
    return torch.sqrt(spread * error.var() + 0.15 * error.mean() ** 2)


def resize(values, size):
    return torch.nn.functional.interpolate(values, size=size, mode='bilinear')


@pytest.mark.slow
@pytest.mark.parametrize('target', ['segmentation', 'depth'])
def test_training_is_pytorchs(target):
    patches, truth = patches_and_truth()
    protocol = Protocol(5, 2, 0.01, 0.1, warmup=2, clip=0.05)
    output = linear_head.classes(CLASSES, -1)
    if target == 'depth':
        protocol = protocol._replace(norm=False, upsample=4, decay='cosine', b2=0.99)
        protocol = protocol._replace(uniform=True, mean_steps=2)
        truth = truth.astype(np.float32)  # -1 and 0 are unknown
        output = linear_head.depths(7, 0.001, 4.0)
    head = linear_head.initial(WIDTH, output, protocol, seed=3)
    trained, statistics = linear_head.train(patches, truth, output, protocol, head, seed=1)

    theirs = torch_head(head, protocol)
    options = {'betas': (0.9, protocol.b2), 'weight_decay': protocol.weight_decay}
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1.0, **options)
    order = linear_head.batches(IMAGES, protocol, np.random.default_rng(1))
    for step, chosen in enumerate(order):
        share = step / protocol.steps
        left = 1 - share if protocol.decay == 'linear' else 0.5 * (1 + math.cos(math.pi * share))
        adamw.param_groups[0]['lr'] = 0.01 * left * min(1, (step + 1) / 3)
        values = theirs(torch.tensor(patches[chosen]).permute(0, 3, 1, 2))
        expected = torch.tensor(truth[chosen])
        size = truth.shape[1:]
        if target == 'depth':
            scores = torch_depth(resize(values, [4 * n for n in GRID]), 4.0)
            known = expected > 0
            spread = step >= protocol.mean_steps
            loss = torch_sig_loss(resize(scores, size)[:, 0][known], expected[known], spread)
        else:
            loss = torch.nn.functional.cross_entropy(
                resize(values, size), expected.long(), ignore_index=-1
            )
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        adamw.step()
    kernel = theirs[1].weight.detach().numpy()[..., 0, 0].T
    np.testing.assert_allclose(trained.kernel, kernel, atol=2e-5)
    assert abs(trained.kernel - head.kernel).max() > 0.01

    theirs.eval()
    values = theirs(torch.tensor(patches[:1]).permute(0, 3, 1, 2))
    expected = values
    if target == 'depth':
        expected = torch_depth(resize(values, [4 * n for n in GRID]), 4.0)
    predicted = linear_head.predict(patches[0], output, protocol, (trained, statistics))
    np.testing.assert_allclose(
        predicted, expected.detach().numpy()[0].transpose(1, 2, 0), atol=1e-3, rtol=1e-4
    )


def test_the_loss_of_depth_is_its_equation():
    rng = np.random.default_rng(0)
    predicted, truth = rng.uniform(0.5, 5, (2, 40)).astype(np.float32)
    expected = torch_sig_loss(torch.tensor(predicted), torch.tensor(truth)).item()
    padded = np.append(truth, [0.0, 0.0, 9.0]).astype(np.float32)  # unknown, unknown, too deep
    guesses = np.append(predicted, [3.0, 4.0, 5.0]).astype(np.float32)
    output = linear_head.depths(2, 0.001, 5.0)
    loss = output.loss(
        jnp.asarray(guesses)[None, None, :, None], jnp.asarray(padded)[None, None], 1.0
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize('size', [(17, 23), (24, 32), (2, 3)])
def test_patches_are_enlarged_as_by_pytorch(size):
    values = np.random.default_rng(0).normal(size=(*GRID, 2)).astype(np.float32)
    view = View.locate(size, GRID, (24, 32), np.array([[0.0, 0.0], [32.0, 24.0]]))
    expected = resize(torch.tensor(values.transpose(2, 0, 1)[None]), size)[0]
    np.testing.assert_allclose(view.enlarge(values), expected.numpy().transpose(1, 2, 0), atol=1e-5)
    assert view.inside().all()
    np.testing.assert_allclose(view.pool(np.ones((*size, 1))).sum(), math.prod(size))


def quarters(seed, crop):
    """Images of four quarters, each of one class, and the one-hot classes of their patches.

    With `crop`, the model's image shows only the central half, at twice the size.
    """
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, CLASSES, (4, 4))
    truth = np.kron(classes, np.ones((SIDE, SIDE), int))
    shown = classes[1:3, 1:3] if crop else classes
    record = {
        'size': truth.shape,
        'segments': (1 + truth).astype(np.int16),
        'labels': np.arange(CLASSES, dtype=np.int32),
        'depth': (1 + truth).astype(np.float32),
    }
    return record, np.eye(CLASSES, dtype=np.float32)[np.kron(shown, np.ones((4, 4), int))]


def measured(evaluator, crop=False, worst=None):
    side = 4 * SIDE
    corners = [[-side, -side], [3 * side, 3 * side]] if crop else [[0, 0], [2 * side, 2 * side]]
    splits = []
    for seeds in (range(8), range(8, 12)):
        records, patches = zip(*(quarters(seed, crop) for seed in seeds), strict=True)
        data = SimpleNamespace(
            source=Source(records),
            info=SourceInfo(CLASSES, ('a', 'b', 'c')),
            corners=lambda *_: np.array(corners, np.float32),
        )
        splits.append((data, np.stack(patches).reshape(len(records), -1, CLASSES)))
    (fit, learned), (data, asked) = splits
    evaluator.open(data, fit)
    if worst is not None:
        asked[0, 0, 0] = worst
    grid = [8, 8] if crop else [16, 16]
    for take, patches in ((evaluator.fit, learned), (evaluator.update, asked)):
        pairs = {'grid': grid, 'frame': [2 * side, 2 * side]}
        rows = {name: np.tile(pair, (len(patches), 1)) for name, pair in pairs.items()}
        take({'patches': patches, **rows}, {'index': np.arange(len(patches))})
    return evaluator.result()


EVALUATORS = {'patch_probe': patch_probe, 'patch_knn': patch_knn}


@pytest.mark.slow
@pytest.mark.parametrize('crop', [False, True])
@pytest.mark.parametrize('name', EVALUATORS)
def test_patches_that_tell_all_are_perfect(name, crop):
    result = measured(EVALUATORS[name].Evaluator(), crop)
    assert result == dict.fromkeys(('mIoU', 'pixel_accuracy', 'mean_class_accuracy'), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize('name', EVALUATORS)
def test_depth_of_patches_that_tell_all(name):
    faster = {'learning_rate': 0.05, 'steps': 200} if name == 'patch_probe' else {}
    result = measured(EVALUATORS[name].Evaluator('depth', **faster))
    assert result['delta1'] > 0.75
    assert result['RMSE'] < 0.35
    assert result['abs_rel'] < 0.25


def test_mirrored_images_and_the_measured_crop():
    """The average of a prediction and that of the mirrored image, mirrored back."""
    evaluator = patch_probe.Evaluator('depth', protocol='dinov2', max_depth=5.0)
    assert evaluator.patches.mirrored and evaluator.patches.class_token
    depth = np.full((48, 64), 2.0, np.float32)
    depth[:4] = 5.0  # above the crop's first row
    record = {'size': depth.shape, 'depth': depth}
    corners = np.array([[0.0, 0.0], [64.0, 48.0]])
    data = SimpleNamespace(source=Source([record]), corners=lambda *_: corners)
    evaluator.open(data, data)
    evaluator.predict = lambda patches: patches[..., :1]  # which left half is wrong in both
    evaluator.finish = lambda: None
    left = np.array([[1.0, 2.0], [1.0, 2.0]], np.float32).reshape(1, 4, 1)
    rows = {'grid': np.array([[2, 2]]), 'frame': np.array([[48, 64]])}
    evaluator.update({'patches': left, 'mirrored': left, **rows}, {'index': np.array([0])})
    result = evaluator.result()
    assert result == {'RMSE': 0.5, 'abs_rel': 0.25, 'delta1': 0.0}


@pytest.mark.parametrize('worst', [math.nan, math.inf])
@pytest.mark.parametrize('name', EVALUATORS)
def test_features_that_are_not_finite(name, worst):
    result = measured(EVALUATORS[name].Evaluator(), worst=worst)
    assert all(map(math.isnan, result.values()))
    assert 'mIoU' in result


@pytest.mark.parametrize(
    ('module', 'keywords'),
    [
        (patch_probe, {'target': 'normals'}),
        (patch_probe, {'protocol': 'mine'}),
        (patch_probe, {'steps': 0}),
        (patch_probe, {'memory': 0.0}),
        (patch_knn, {'temperature': 0.0}),
        (patch_knn, {'bank': 0}),
    ],
)
def test_keywords_that_cannot_be(module, keywords):
    with pytest.raises(UserError, match=next(iter(keywords))):
        module.Evaluator(**keywords)


def test_features_that_do_not_fit_into_memory():
    with pytest.raises(UserError, match=r"memory=1e-06.*fit='train\[:1\]'"):
        measured(patch_probe.Evaluator(memory=1e-6))


GRAY, COLOR = 'helpers.gray_scenes:8', 'scenes_panoptic:8'
LONG = {
    **dict.fromkeys(('dinov2', 'lejepa', 'vit', 'swin', 'projected'), GRAY),
    **dict.fromkeys(('siglip', 'cappa', 'clip', 'eomt'), COLOR),
}


@pytest.mark.parametrize(
    ('name', 'source'),
    [
        ('mae', GRAY),  # its encoder is a separate model
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in LONG.items()),
    ],
)
def test_runs_are_measured(name, source):
    trained = open_model(GOLDEN / f'run_{name}')
    results = measure.prepare(
        trained,
        image_size=None if name == 'eomt' else trained.image_size,
        source=source,
        split='test[:4]',
        fit='train',
        evaluators=['patch_probe(steps=2)', 'patch_knn'],
    ).run()
    for evaluator in EVALUATORS:  # few patches of weak encoders: their classes may all be wrong
        assert 0 <= results[f'{evaluator}/mIoU'] <= 1
