import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.applies import Given

from vit_jax.errors import UserError
from vit_jax.ops import terms
from vit_jax.tasks.classify import Task, asymmetric_loss, balanced_weights

CLASSES = 5


def make_batch(size=6, side=16):
    rng = np.random.default_rng(0)
    return {
        'image': jnp.asarray(rng.integers(0, 256, (size, side, side, 3), dtype=np.uint8)),
        'label': jnp.asarray(rng.integers(0, CLASSES, size), jnp.int32),
    }


def make_logits(size=6):
    return jnp.asarray(np.random.default_rng(1).normal(size=(size, CLASSES)), jnp.float32)


def log_softmax(logits):
    logits = np.asarray(logits)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def sigmoid(logits):
    return 1 / (1 + np.exp(-np.asarray(logits)))


def swap(x):
    """Each example's partner: 2i and 2i + 1 change places."""
    return x.reshape(-1, 2, *x.shape[1:])[:, ::-1].reshape(x.shape)


def test_bytes_become_the_value_range():
    batch = make_batch()
    (image,) = Task().inputs(batch)
    np.testing.assert_allclose(image, (np.asarray(batch['image']) - 127.5) / 127.5, atol=1e-6)
    (image,) = Task(value_range=(0.0, 1.0)).inputs(batch)
    np.testing.assert_allclose(image, np.asarray(batch['image']) / 255.0, atol=1e-6)


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_softmax_loss_and_label_smoothing(smoothing):
    batch, logits = make_batch(), make_logits()
    means = terms.means(Task(label_smoothing=smoothing).loss({'logits': logits}, batch))
    logp = log_softmax(logits)
    on_label = logp[np.arange(6), batch['label']]
    expected = -((1 - smoothing) * on_label + smoothing * logp.mean(-1))
    assert float(means['loss']) == pytest.approx(expected.mean(), rel=1e-6)
    assert float(means['accuracy']) == float((logits.argmax(-1) == batch['label']).mean())


def test_sigmoid_loss_sums_one_against_all():
    batch, logits = make_batch(), make_logits()
    loss = terms.means(Task(loss_name='sigmoid').loss({'logits': logits}, batch))['loss']
    p = sigmoid(logits)
    target = np.eye(CLASSES)[batch['label']]
    expected = -(target * np.log(p) + (1 - target) * np.log(1 - p)).sum(-1).mean()
    assert float(loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('mix', 'loss_name'),
    [
        ('mixup', 'softmax'),
        ('cutmix', 'sigmoid'),
        pytest.param('mixup', 'sigmoid', marks=pytest.mark.long),
        pytest.param('cutmix', 'softmax', marks=pytest.mark.long),
    ],
)
def test_loss_of_a_mix_is_that_of_the_mixed_labels(loss_name, mix):
    task = Task(loss_name=loss_name, label_smoothing=0.1, **{mix: 1.0})
    logits, batch = make_logits(), make_batch()

    @jax.jit
    def mix_and_measure(batch):
        mixed = task.augment(jax.random.key(3), batch)
        return mixed, terms.means(task.loss({'logits': logits}, mixed))['loss']

    mixed, loss = mix_and_measure(batch)

    weight = np.asarray(mixed['label_weight'])[:, None]
    hot = np.eye(CLASSES)[batch['label']] * 0.9 + 0.1 / CLASSES
    target = weight * hot + (1 - weight) * swap(hot)
    logp = log_softmax(logits)
    if loss_name == 'sigmoid':
        p = sigmoid(logits)
        logp = np.log(p)
        expected = -(target * logp + (1 - target) * np.log(1 - p)).sum(-1).mean()
    else:
        expected = -(target * logp).sum(-1).mean()
    assert 0 < weight[0] < 1
    assert float(loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_mixup_is_a_weighted_mean_with_the_neighbor_in_which_the_label_leads():
    task, batch = Task(mixup=0.4), make_batch()
    image = np.asarray(task.inputs(batch)[0])
    augment, weights = jax.jit(task.augment), []
    for seed in range(20):
        mixed = augment(jax.random.key(seed), batch)
        weight = float(mixed['label_weight'][0])
        np.testing.assert_array_equal(mixed['label_weight'], np.float32(weight))
        np.testing.assert_array_equal(mixed['label'], batch['label'])
        np.testing.assert_array_equal(mixed['label_other'], swap(np.asarray(batch['label'])))
        expected = weight * image + (1 - weight) * swap(image)
        np.testing.assert_allclose(mixed['image'], expected, atol=1e-6)
        weights.append(weight)
    assert min(weights) >= 0.5
    assert len(set(weights)) == 20


@pytest.mark.slow
def test_cutmix_pastes_one_box_whose_area_is_one_minus_the_weight():
    augment, areas = jax.jit(Task(cutmix=1.0).augment), []
    image = jnp.zeros((2, 12, 16, 1)).at[1].set(1.0)
    batch = {'image': image, 'label': jnp.array([0, 1])}
    for seed in range(50):
        mixed = jax.tree.map(np.asarray, augment(jax.random.key(seed), batch))
        pasted = mixed['image'][0, :, :, 0]
        np.testing.assert_array_equal(mixed['image'][1, :, :, 0], 1 - pasted)
        rows, columns = pasted.any(1), pasted.any(0)
        np.testing.assert_array_equal(pasted, np.outer(rows, columns))
        assert is_interval(rows)
        assert is_interval(columns)
        areas.append(pasted.mean())
        np.testing.assert_allclose(mixed['label_weight'], 1 - pasted.mean(), atol=1e-6)
    assert min(areas) < 0.2
    assert max(areas) > 0.5


def is_interval(mask):
    return np.abs(np.diff(np.concatenate([[0], mask, [0]]))).sum() <= 2


@pytest.mark.slow
def test_cutmix_weight_is_uniform_when_alpha_is_one():
    """Boxes that the border does not clip have sides sqrt(1 - lambda), lambda ~ Beta(1, 1)."""
    task = Task(cutmix=1.0)
    batch = make_batch(size=2, side=64)
    augment = jax.jit(lambda key: task.augment(key, batch)['label_weight'][0])
    weights = np.asarray(jax.lax.map(augment, jax.random.split(jax.random.key(0), 400)))
    # Clipping keeps on average between 9/16 (a box as large as the image) and all of it.
    assert 0.5 < weights.mean() < 1 - 0.5 * 9 / 16


@pytest.mark.slow
def test_with_both_a_fair_coin_picks_one():
    task = Task(mixup=1.0, cutmix=1.0)
    black = jnp.zeros((1, 16, 16, 3), jnp.uint8)
    batch = {'image': jnp.concatenate([black, black + 255]), 'label': jnp.array([0, 1])}
    augment = jax.jit(lambda key: task.augment(key, batch)['image'])
    images = np.asarray(jax.lax.map(augment, jax.random.split(jax.random.key(0), 300)))
    # Mixup leaves values between black and white, cutmix only these two.
    mixups = (np.abs(images) < 0.999).any((1, 2, 3, 4))
    assert 0.4 < mixups.mean() < 0.6


def test_without_mixing_the_batch_is_untouched():
    batch = make_batch(size=3)
    assert Task().augment(jax.random.key(0), batch) is batch
    assert [Task(**mix).multiple for mix in ({}, {'mixup': 0.1}, {'cutmix': 0.1})] == [1, 2, 2]


def test_rows_of_padding_count_nowhere():
    batch, logits = make_batch(), make_logits()
    whole = Task().loss({'logits': logits[:4]}, {k: x[:4] for k, x in batch.items()})
    padded = batch | {'mask': jnp.array([1.0, 1, 1, 1, 0, 0])}
    masked = Task().loss({'logits': logits}, padded)
    assert terms.counts(masked) == {'loss': 4.0, 'accuracy': 4.0}
    np.testing.assert_allclose(masked['loss'].sum, whole['loss'].sum, rtol=1e-6)
    assert masked['accuracy'].sum == whole['accuracy'].sum


def test_evaluation_leaves_padding_and_smoothing_out():
    batch, logits = make_batch(), make_logits()
    batch['mask'] = jnp.array([1.0, 1, 0, 1, 0, 1])
    real = np.asarray(batch['mask']) == 1
    sums = Task(label_smoothing=0.3).evaluate(Given(lambda _: {'logits': logits}), batch)
    losses = -log_softmax(logits)[np.arange(6), batch['label']]
    correct = np.asarray(logits.argmax(-1) == batch['label'])
    np.testing.assert_allclose(sums['loss'], (losses[real].sum(), 4), rtol=1e-6)
    np.testing.assert_allclose(sums['accuracy'], (correct[real].sum(), 4))


@pytest.mark.parametrize('loss_name', ['softmax', 'sigmoid'])
def test_predicted_probabilities(loss_name):
    logits = make_logits()
    probs = Task(loss_name=loss_name).predict(Given(lambda _: {'logits': logits}), make_batch())[
        'probs'
    ]
    if loss_name == 'softmax':
        np.testing.assert_allclose(probs, np.exp(log_softmax(logits)), rtol=1e-5)
    else:
        np.testing.assert_allclose(probs, sigmoid(logits), rtol=1e-5)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'loss_name': 'softmx'}, "did you mean 'softmax'"),
        ({'label_smoothing': 1.0}, 'label_smoothing=1.0'),
        ({'mixup': -0.1}, 'config.task.mixup=-0.1'),
        ({'cutmix': -0.1}, 'config.task.cutmix=-0.1'),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        Task(**options)


def make_marks():
    """Some images with several classes, one of them with none."""
    marks = np.random.default_rng(2).integers(0, 2, (6, CLASSES)).astype(np.uint8)
    marks[0] = 0
    return jnp.asarray(marks)


def test_several_classes_are_a_sum_of_binary_cross_entropies():
    logits, marks = make_logits(), make_marks()
    batch = {**make_batch(), 'label': marks}
    found = terms.means(Task(loss_name='sigmoid').loss({'logits': logits}, batch))
    probs, right = sigmoid(logits), np.asarray(marks, bool)
    losses = -np.where(right, np.log(probs), np.log(1 - probs)).sum(-1)
    np.testing.assert_allclose(found['loss'], losses.mean(), rtol=1e-5)
    best, labeled = np.asarray(logits).argmax(-1), right.any(-1)
    assert not labeled.all()
    np.testing.assert_allclose(found['accuracy'], right[np.arange(6), best][labeled].mean())
    perfect = Given(lambda image: {'logits': 100.0 * marks})
    total, count = Task(loss_name='sigmoid').evaluate(perfect, batch)['accuracy']
    assert total == count == labeled.sum()


def test_asymmetric_loss_equals_the_authors():
    """Their sum over classes and images, and its gradient, by Alibaba-MIIL/ASL at 8c9e0bd."""
    logits = (jnp.arange(12.0).reshape(3, 4) - 5.5) / 1.5
    labels = jnp.array([[1.0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]])
    run = jax.jit(jax.value_and_grad(lambda x: asymmetric_loss(x, labels).sum()))
    loss, gradient = run(logits)
    np.testing.assert_allclose(loss, 7.044938087463379, rtol=1e-5)
    expected = [
        [-0.9507724, 0.0, 2e-7, -0.7075012],
        [0.0005784, 0.0070068, 0.0418526, 0.1326285],
        [-0.0252394, -0.0078145, 0.3077311, -0.0006212],
    ]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_positive_weights_equal_torch():
    torch = pytest.importorskip('torch')
    logits, marks = make_logits(), make_marks()
    weights = (0.5, 2.0, 0.0, 1.0, 3.0)
    task = Task(loss_name='sigmoid', class_weights=weights)
    found = terms.means(task.loss({'logits': logits}, {**make_batch(), 'label': marks}))
    losses = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weights), reduction='none')(
        torch.tensor(np.asarray(logits)), torch.tensor(np.asarray(marks), dtype=torch.float32)
    )
    np.testing.assert_allclose(found['loss'], losses.sum(-1).mean().item(), rtol=1e-5)


def test_marks_of_one_class_each_are_its_number():
    batch, logits = make_batch(), {'logits': make_logits()}
    task = Task(loss_name='sigmoid', label_smoothing=0.1, mixup=0.3)
    marks = jax.nn.one_hot(batch['label'], CLASSES).astype(jnp.uint8)
    key = jax.random.key(0)
    one, other = (
        terms.means(task.loss(logits, task.augment(key, {**batch, 'label': label})))
        for label in (batch['label'], marks)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, other)


def test_a_softmax_takes_one_class_an_image():
    with pytest.raises(UserError, match="loss_name='sigmoid'"):
        Task().loss({'logits': make_logits()}, {**make_batch(), 'label': make_marks()})


SHARES = np.array([0.5, 0.25, 0.25, 0.0, 0.0])


def test_balanced_weights_make_classes_count_alike():
    np.testing.assert_allclose(balanced_weights(SHARES), [2 / 3, 4 / 3, 4 / 3, 1, 1])
    task = Task(class_weights='balanced').for_data(CLASSES, SHARES)
    assert task.class_weights == balanced_weights(SHARES * 40)
    assert task.for_data(CLASSES, None) == task
    assert Task().for_data(CLASSES, SHARES) == Task()


@pytest.mark.parametrize('mix', [{}, {'mixup': 0.3}])
@pytest.mark.parametrize('loss_name', ['softmax', 'sigmoid'])
def test_a_loss_is_weighted_by_the_class_of_its_image(loss_name, mix):
    batch, logits = make_batch(), make_logits()
    weights = (0.5, 2.0, 0.0, 1.0, 3.0)
    task = Task(loss_name=loss_name, class_weights=weights, **mix)
    batch = task.augment(jax.random.key(1), batch)
    plain = Task(loss_name=loss_name)
    found = terms.means(task.loss({'logits': logits}, batch))

    def weighted(label):
        return np.array(weights)[np.asarray(label)] * np.asarray(plain._losses(logits, label))

    expected = weighted(batch['label'])
    if mix:
        share = np.asarray(batch['label_weight'])
        expected = share * expected + (1 - share) * weighted(batch['label_other'])
    np.testing.assert_allclose(found['loss'], expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        found['accuracy'], terms.means(plain.loss({'logits': logits}, batch))['accuracy']
    )
    apply = Given(lambda image: {'logits': logits})
    jax.tree.map(np.testing.assert_array_equal, *(t.evaluate(apply, batch) for t in (task, plain)))


@pytest.mark.parametrize(
    ('weights', 'shares', 'message'),
    [
        ('equal', SHARES, 'class_weights'),
        ((1.0, -1.0), SHARES, 'class_weights'),
        ((), SHARES, 'class_weights'),
        ((1.0, 2.0), SHARES, 'class_weights has 2 .* 5 classes'),
        ('balanced', None, "class_weights='balanced'"),
    ],
)
def test_mistakes_in_class_weights(weights, shares, message):
    with pytest.raises(UserError, match=message):
        Task(class_weights=weights).for_data(CLASSES, shares)


def test_weights_of_several_classes_need_a_loss_that_takes_them():
    task = Task(loss_name='optax.losses.sigmoid_focal_loss', class_weights=(1.0,) * CLASSES)
    with pytest.raises(UserError, match='class_weights'):
        task.loss({'logits': make_logits()}, {**make_batch(), 'label': make_marks()})
