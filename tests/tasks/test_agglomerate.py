"""Several teachers at once: PHI-S, the losses, and a run that resumes and loads as a plain ViT."""

import functools
import pathlib
import shutil

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from helpers.experiments import ROOT
from helpers.pictures import count, images_like, shapes

import vit_jax
from vit_jax.__main__ import main
from vit_jax.checkpoints import checkpointer
from vit_jax.config import load, origin
from vit_jax.data import sources
from vit_jax.errors import UserError
from vit_jax.models import vit, vit_adaptors
from vit_jax.ops import phi_s
from vit_jax.profiling import task_flops
from vit_jax.tasks import agglomerate
from vit_jax.tasks.agglomerate import Standardize
from vit_jax.tasks.base import check_rows_are_separable
from vit_jax.trainer import build, train
from vit_jax.tree_paths import param_paths

RECIPE = f'{ROOT}/experiments/agglomerate/cifar10.py:smoke'
STATISTICS = f'{ROOT}/experiments/agglomerate/smoke_statistics.npz'
TEACHER = f'{ROOT}/experiments/distill/smoke_teacher.npz'
SMALL = ('model.width=8', 'model.mlp_dim=8', 'model.hidden=8')


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize('size', [1, 2, 4, 12, 20, 28, 36, 72, 104, 192])
def test_hadamard_matrices(size):
    matrix = phi_s.hadamard(size)
    assert set(np.unique(matrix)) <= {-1, 1}
    np.testing.assert_array_equal(matrix @ matrix.T, size * np.eye(size))


@pytest.mark.parametrize(('width', 'rank'), [(8, 8), (12, 3), (10, 10), (10, 4)])
def test_phi_s_gives_equal_variances_and_inverts(width, rank):
    features = 3 * drawn(0, 500, rank) @ drawn(1, rank, width) + 5
    moments = phi_s.Moments()
    moments.add(features[:100].reshape(20, 5, width))
    moments.add(features[100:])
    found = phi_s.standardization(moments)
    layer = Standardize(width)
    standardized = layer.apply({'params': found}, jnp.asarray(features))
    np.testing.assert_allclose(standardized.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(standardized.var(0, ddof=1), 1, rtol=1e-4)
    restored = layer.apply({'params': found}, standardized, method='invert')
    np.testing.assert_allclose(restored, features, atol=1e-4)
    if (signs := phi_s.hadamard(width)) is None:
        return
    covariance, normalized = np.cov(features.astype(np.float64).T), signs / np.sqrt(width)
    values = np.linalg.eigvalsh(covariance)
    expected = normalized @ np.diag(values / values.mean()) @ normalized.T
    matrix = found['matrix'].astype(np.float64)
    np.testing.assert_allclose(matrix @ covariance @ matrix.T, expected, atol=1e-4)


@pytest.mark.parametrize(
    ('rows', 'word'),
    [(np.ones((1, 4)), 'two'), (np.ones((3, 4)), 'vary'), (np.full((3, 4), np.nan), 'finite')],
)
def test_features_without_statistics_are_refused(rows, word):
    moments = phi_s.Moments()
    moments.add(rows)
    with pytest.raises(UserError, match=word):
        phi_s.standardization(moments)


def test_losses_are_those_of_torch():
    x, y = drawn(0, 2, 6, 5), 3 * drawn(1, 2, 6, 5)
    ours, theirs = (jnp.asarray(x), jnp.asarray(y)), (torch.tensor(x), torch.tensor(y))
    cosines = torch.nn.functional.cosine_similarity(*theirs, dim=-1)
    np.testing.assert_allclose(agglomerate.distances(*ours), 1 - cosines, atol=1e-6)
    smooth = torch.nn.functional.smooth_l1_loss(*theirs, reduction='none').mean(-1)
    np.testing.assert_allclose(agglomerate.smooth_l1(*ours), smooth, atol=1e-6)
    maps = theirs[0].reshape(2, 2, 3, 5).permute(0, 3, 1, 2)
    larger = torch.nn.functional.interpolate(maps, (5, 6), mode='bilinear')
    found = agglomerate.interpolate(ours[0], (2, 3), (5, 6))
    np.testing.assert_allclose(found, larger.permute(0, 2, 3, 1).reshape(2, 30, 5), atol=1e-5)


@pytest.mark.slow
def test_terms_are_sums_with_weights_over_real_rows():
    task = agglomerate.Task(teachers=('a', 'b'), weights=(2.0, 1.0), cosine_weight=0.5)
    outputs = {f'summary_{i}': drawn(i, 4, 3) for i in range(2)}
    outputs |= {f'target_summary_{i}': drawn(5 + i, 4, 3) for i in range(2)}
    outputs |= {'patches_0': drawn(8, 4, 6, 5), 'target_patches_0': drawn(9, 4, 6, 5)}
    outputs = jax.tree.map(jnp.asarray, outputs)
    mask = jnp.asarray([1.0, 1, 0, 1])
    batch = {'image': np.zeros((4, 2, 2, 3), np.uint8), 'mask': mask}
    terms = task.loss(outputs, batch)
    weights = {name: term.weight for name, term in terms.items()}
    assert weights == pytest.approx(
        {'summary_0': 2, 'cosine_0': 1, 'smooth_l1_0': 0.2, 'summary_1': 1}
    )
    real = mask > 0
    expected = agglomerate.distances(outputs['patches_0'][real], outputs['target_patches_0'][real])
    assert float(terms['cosine_0'].sum) == pytest.approx(float(expected.mean(1).sum()), rel=1e-5)
    assert float(terms['cosine_0'].count) == 3
    check_rows_are_separable(task, outputs, batch)


@pytest.mark.slow
def test_a_vit_with_adaptors():
    fields = {'patch_size': 4, 'width': 8, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2}
    model = vit_adaptors.Model(
        **fields, registers=2, summary_widths=(3, 5), patch_widths=(0, 6), hidden=7
    )
    params, plain = shapes(model, (8, 8)), vit.Model(**fields, registers=2)
    sizes = [(8 + 1) * 7 + 2 * 7 + (7 + 1) * width for width in (3, 5, 6)]
    assert count(params) == count(shapes(plain, (8, 8))) + sum(sizes)
    image = images_like(2, 8, 8, 3)
    outputs, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), image)
    found = {k: x.shape for k, x in outputs.items() if k.startswith(('summary', 'patches'))}
    assert found == {
        'patches': (2, 4, 8),
        'patches_1': (2, 4, 6),
        'summary_0': (2, 3),
        'summary_1': (2, 5),
    }
    for wrong in (
        {'patch_widths': (1,)},
        {'hidden': 0},
        {'summary_widths': (-1, 2)},
        {'adaptor': 2},
    ):
        with pytest.raises(UserError):
            vit_adaptors.Model(**{'summary_widths': (3, 5), 'patch_widths': (0, 6), **wrong})


def test_statistics_of_the_command_standardize_its_teacher(tmp_path, capsys):
    words = ['standardize', TEACHER, 'digits', '--split', 'train[:20]', '--image-size', '8']
    assert main([*words, '--out', str(tmp_path / 'a.npz')]) == 0
    found = dict(np.load(tmp_path / 'a.npz'))
    assert main(['embed', *words[1:], '--features', 'patches', '--out', f'{tmp_path}/b.npz']) == 0
    patches = np.load(tmp_path / 'b.npz')['patches'].reshape(-1, 8)
    standardized = (patches - found['mean']) @ found['matrix'].T
    np.testing.assert_allclose(standardized.var(0, ddof=1), 1, rtol=1e-3)
    capsys.readouterr()
    assert main([*words, '--out', str(tmp_path / 'a.txt')]) == 2
    assert '--out' in (said := capsys.readouterr().err) and said.count('\n') == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ('given', 'message'),
    [
        (["task.teachers=('',)", 'task.sizes=()', 'task.statistics=()'], r'task\.teachers\[0\]'),
        ([f"task.statistics=('{TEACHER}','')"], r'task\.statistics\[0\].*standardize'),
        (['task.weights=(1.0,)'], r'task\.weights'),
        (['model.summary_widths=(8,9)'], r'task\.teachers\[1\].*summary_widths\[1\]'),
        (['model.patch_widths=(0,8)'], r'task\.teachers\[0\].*patch_widths\[0\]'),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(UserError, match=message):
        flops_of(build.build(load.load(RECIPE, [*SMALL, *given]), jax.devices()[:1]))


def flops_of(training):
    program = training.program
    return task_flops.training_flops(program.model, program.task, training.data.spec)


GOLDEN = f'{ROOT}/tests/golden/run_agglomerate'


def predicted_by_hand(adaptor, x):
    """An adaptor's outputs, in NumPy and float64."""
    flat = {k: np.asarray(v, np.float64) for k, v in param_paths(adaptor).items()}
    x = np.asarray(x, np.float64) @ flat['fc1/kernel'] + flat['fc1/bias']
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    x = x * flat['norm/scale'] + flat['norm/bias']
    x = torch.nn.functional.gelu(torch.tensor(x)).numpy()
    return x @ flat['fc2/kernel'] + flat['fc2/bias']


@pytest.mark.parametrize('number', [0, 1])
def test_an_adaptor_by_name_is_in_the_space_of_its_teacher(number, monkeypatch):
    monkeypatch.chdir(ROOT)
    params = checkpointer.load_variables(pathlib.Path(GOLDEN) / 'checkpoints')[1]['params']
    image = images_like(2, 8, 8, 1)
    plain, variables = vit_jax.load(GOLDEN)
    own = jax.jit(plain.apply)(variables, image)
    summary, patches = (
        predicted_by_hand(params[f'adaptor_{kind}_{number}'], x)
        for kind, x in (('summary', own['pre_logits']), ('patches', own['tokens'][:, 1:]))
    )
    if number == 0:  # the other has no statistics
        arrays = dict(np.load(STATISTICS))
        patches = np.linalg.solve(arrays['matrix'].astype(float), patches.reshape(-1, 8).T).T
        patches = (patches + arrays['mean']).reshape(2, -1, 8)
    model, variables = vit_jax.load(GOLDEN, adaptor=f'smoke_teacher_{number}')
    normalized = functools.partial(model.hidden_states, normalized=True)
    found, (state,) = jax.jit(normalized)(variables, image)
    np.testing.assert_allclose(found['pre_logits'], summary, rtol=1e-4, atol=1e-5)
    for name in ('tokens', 'patches'):
        np.testing.assert_allclose(found[name], patches, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.patches, patches, rtol=1e-4, atol=1e-5)
    assert [key for key in variables['params'] if key.startswith('adaptor')] == [
        f'adaptor_{kind}_{number}' for kind in ('patches', 'summary')
    ]


@pytest.mark.long
def test_commands_take_an_adaptor(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    chosen = ['--adaptor', 'smoke_teacher_0']
    model, variables = vit_jax.load(GOLDEN, adaptor=chosen[1])
    kinds = ['--features', 'embedding,patches,mean', '--out', str(tmp_path / 'a.npz')]
    assert main(['embed', GOLDEN, 'digits', '--split', 'test[:3]', *chosen, *kinds]) == 0
    found = np.load(tmp_path / 'a.npz')
    np.testing.assert_allclose(found['mean'], found['patches'].mean(1), atol=1e-6)
    assert main(['export', GOLDEN, str(tmp_path / 'out'), *chosen]) == 0
    digits = sources.open_source('digits', 'test[:3]')
    images = np.stack([digits[i]['image'] for i in range(3)])
    outputs = jax.jit(model.apply)(variables, images / 127.5 - 1)
    np.testing.assert_allclose(found['embedding'], outputs['pre_logits'], atol=1e-5)
    np.testing.assert_allclose(found['patches'], outputs['patches'], atol=1e-5)
    program = jax.export.deserialize((tmp_path / 'out' / 'model.stablehlo').read_bytes())
    weights = safetensors.numpy.load_file(tmp_path / 'out' / 'weights.safetensors')
    exported = program.call(weights, {'image': images})
    np.testing.assert_allclose(exported['features'], outputs['pre_logits'], atol=1e-5)
    assert main(['evaluate', GOLDEN, *chosen]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ('reference', 'adaptor', 'words'),
    [
        (GOLDEN, 'dinov2', ('dinov2', 'smoke_teacher_0, smoke_teacher_1')),
        (f'{ROOT}/tests/golden/run_vit', 'dinov2', ('dinov2', 'none')),
        (TEACHER, 'dinov2', ('adaptor', 'run')),
    ],
)
def test_names_of_adaptors(reference, adaptor, words):
    with pytest.raises(UserError) as raised:
        vit_jax.load(reference, adaptor=adaptor)
    assert all(word in str(raised.value) for word in words)
    assert '\n' not in str(raised.value)


def test_an_adaptor_needs_the_statistics_of_its_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the stored run names them by a relative path
    file = tmp_path / 'experiments' / 'agglomerate' / 'smoke_statistics.npz'
    file.parent.mkdir(parents=True)
    arrays = dict(np.load(STATISTICS))
    for content, word in ((None, ''), (arrays | {'mean': arrays['mean'] + 1}, r'statistics\[0\]')):
        if content:
            np.savez(file, **content)
        with pytest.raises(UserError, match=f'smoke_statistics.npz.*{word}'):
            vit_jax.load(GOLDEN, adaptor='smoke_teacher_0')


def test_teachers_name_adaptors():
    teachers = ('hf://facebook/dinov2-small', 'runs/a/', 'b/teacher.npz', 'c/teacher.npz')
    named = agglomerate.Task(teachers=teachers)
    assert named.adaptors == ('dinov2-small', 'a', 'teacher_2', 'teacher_3')
    assert agglomerate.Task(teachers=teachers[:2], names=('x', 'y')).adaptors == ('x', 'y')
    for wrong in (('x',), ('x', 'x')):
        with pytest.raises(UserError, match=r'task\.names'):
            agglomerate.Task(teachers=teachers[:2], names=wrong)


def test_code_of_teachers_needs_permission():
    config = {'task': {'name': 'agglomerate', 'teachers': ('my_lab.swin:a.npz', 'b.npz')}}
    assert ('task.teachers[0]', 'my_lab.swin') in tuple(origin.dotted_names(config))


@pytest.mark.slow
@pytest.mark.usefixtures('compiled_once')
def test_a_run_of_two_teachers_resumes_bit_for_bit_and_loads_as_a_vit(tmp_path):
    for name in ('whole', 'parts'):
        shutil.copy(STATISTICS, tmp_path / 'statistics.npz')
        given = [*SMALL, 'total=4 steps', 'every.checkpoint=2', 'every.log=1', 'every.eval=4']
        config = load.load(RECIPE, [*given, f"task.statistics=('{tmp_path}/statistics.npz','')"])
        with config.unlocked():
            config.evals = {}
        stops = (2, None) if name == 'parts' else (None,)
        for stop_at in stops:
            try:
                train.train(config, tmp_path / name, stop_at=stop_at, devices=jax.devices()[:1])
            except train.Preempted:
                assert stop_at == 2
    whole, parts = (
        checkpointer.load_variables(tmp_path / name / 'checkpoints') for name in ('whole', 'parts')
    )
    assert parts[2]['frozen'].keys() == {'teachers[0]', 'teachers[1]', 'statistics[0]'}
    for path, value in param_paths(whole[1]['params']).items():
        np.testing.assert_array_equal(value, param_paths(parts[1]['params'])[path])
    model, variables = vit_jax.load(tmp_path / 'parts')
    assert isinstance(model, vit.Model) and not isinstance(model, vit_adaptors.Model)
    assert not [path for path in variables['params'] if path.startswith('adaptor')]
    outputs = jax.jit(model.apply)(variables, images_like(1, 8, 8, 1))
    assert outputs['pre_logits'].shape == (1, 8)

    (tmp_path / 'statistics.npz').unlink()  # the run keeps its own
    adapted, variables = vit_jax.load(tmp_path / 'parts', adaptor='smoke_teacher_0')
    assert jax.jit(adapted.apply)(variables, images_like(1, 8, 8, 1))['patches'].shape[2] == 8
    shutil.copy(STATISTICS, tmp_path / 'statistics.npz')

    arrays = dict(np.load(STATISTICS))
    np.savez(tmp_path / 'other.npz', **arrays | {'mean': arrays['mean'] + 1})
    (tmp_path / 'parts' / 'result.json').unlink()
    config.task.statistics = (f'{tmp_path}/other.npz', '')
    (tmp_path / 'parts' / 'config.json').write_text(load.to_json(config))
    with pytest.raises(UserError, match=r'task\.statistics\[0\]'):
        train.train(config, tmp_path / 'parts', devices=jax.devices()[:1])
