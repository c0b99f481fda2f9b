"""The commands of the documents run as they are printed, on runs of smoke size.

Left to others are `train` (tests/test_smoke.py trains every experiment), `launch` (tests/launch,
which submit to a real Slurm) and `preflight` (test_preflight.py, which needs a compiler of TPUs).
"""

from __future__ import annotations

import itertools
import pathlib
import re
import shlex
import shutil

import jax
import numpy as np
import pytest
from helpers import hub_server
from PIL import Image
from test_readme import LINES, ROOT

from vit_jax import __main__, interop
from vit_jax.interop import files
from vit_jax.interop.families import vision_transformer
from vit_jax.models import vit

pytestmark = [pytest.mark.long, pytest.mark.slow]

WRITES = ('--out', '--output', '--report')
ELSEWHERE = ('train', 'launch', 'preflight')
# {pattern: what a smoke run lacks}
NOT_HERE = {
    r'imagenet': 'the images of ImageNet',
    r'gs://(my-|mixer_models)': 'a bucket',
    r'hf://google/siglip': 'the files of SigLIP',
    r'hf://openai/clip': 'the files of CLIP',
    r'soup clip/': 'a CLIP and a run that went on from it',
    r'data/bccd': 'the photographs of blood cells',
    r'pack .*--split': 'a folder of two splits',
    r'/kaggle': 'a run in a notebook of Kaggle',
    r'standardize hf://': 'color images of one class each',
    r'push ': 'a login of the Hub',
    r'depth-anything': 'the files of Depth Anything',
    r'/data/robustness': 'images with corruptions',
    r'runs/long': 'a long run and its branch',
    r'--csv (few|openclip|chinchilla|llama3)\.csv': 'the published table',
    r'scaling report runs/ |scaling tuned|--tuned tuned': 'runs of several sizes and rates',
    r"patch_probe\(protocol='dinov2'": 'a run at 32 pixels',
    r'(depth|masks):': 'images with masks or depth',
    r'my_lab': "a package of one's own",
    r'--coordinator': 'two hosts',
    r'benchmark\.vision\.csv': 'the published curves',
    r'--csv isoflop\.csv': 'a minimum within the sizes at every budget',
    r'bleu': 'the BLEU of an hour',
    r'--curves 250': 'more than an hour, see tests/scaling/test_coverage.py',
    r'--y 1-test/accuracy --by config': 'runs of several lengths',
    r'fewshot/10_shot': 'few-shot accuracies of ImageNet',
    r'scaling (shape|optimal --csv runs)': 'runs of several shapes and lengths',
    r'runs/multi30k --average': 'the pairs of Multi30k',
    r'kept_accuracy|drawn_colors': 'color images with labels',
    r'init\.from=runs/dinov2_cifar10': 'an encoder of the size of the classifier',
}
# The runs that the documents name, by the experiment that trains a small one.
RUNS = {
    'vit/digits.py:smoke': ('digits', 'a', 'b', 'c', 'gallery/digits', 'gallery/digits_slow'),
    'vit/digits_naflex.py:smoke': ('naflex_digits',),
    'vit/cifar10.py:smoke': ('cifar10', 'classifier', 'cifar10_b16'),
    'vit/finetune.py:auto': ('flowers',),
    'vit/finetune.py:auto,lora': ('flowers_lora',),
    'colorization/cifar10.py:smoke': ('colorize',),
    'colorization/coltran_core.py:smoke': ('core',),
    'colorization/coltran_upsamplers.py:color,smoke': ('color',),
    'colorization/coltran_upsamplers.py:spatial,smoke': ('spatial',),
    'detr/bccd.py:smoke': ('bccd_scenes',),
    'detr/scenes.py:smoke': ('scenes',),
    'detr/scenes_panoptic.py:smoke': ('scenes_panoptic',),
    'rfdetr/scenes.py:smoke': ('rfdetr', 'cells'),
    'dpt/scenes.py:smoke': ('depth',),
    'eomt/scenes.py:smoke': ('eomt',),
    'eomt/finetune.py:smoke': ('leaves',),
    'jit/digits.py:smoke': ('jit_digits',),
    'jit/restore.py:smoke': ('jit_small_digits', 'jit_gray'),
    'meanflow/digits.py:smoke': ('meanflow_digits',),
    'mae/cifar10.py:smoke': ('mae_cifar10', 'mae_smoke', 'mae_half'),
    'dinov2/cifar10.py:smoke': ('dinov2_cifar10',),
    'dinov2/own.py:smoke': ('own',),
    'cappa/scenes.py:smoke': ('cappa',),
    'siglip/scenes.py:smoke': ('siglip',),
    'siglip2/scenes.py:smoke': ('siglip2',),
    'swin/cifar10.py:smoke': ('gallery/swin',),
    'translate/synthetic.py:smoke': ('reverse', 'gallery/reverse'),
}
FLOWERS = [
    *('--config.data.source=folder:data/flowers', '--config.init.from=ViT-B_16.npz'),
    *('--config.total=2', '--config.batch_size=4'),
]
# What the documents tell to train them with.
TRAINED_WITH = {
    **{run: ['--config.checkpoint.keep_best=test/accuracy'] for run in ('a', 'c')},
    'cifar10_b16': ['--config.model.pool=cls'],
    'flowers': FLOWERS,
    'flowers_lora': FLOWERS,
    'spatial': [
        f'--config.{section}.transforms=keep("image")|resize(32)'
        for section in ('data', 'evals.test')
    ],
}
AUGREG = 'augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0'
EXPERIMENT_OF = {run: experiment for experiment, runs in RUNS.items() for run in runs}
SIZES = {
    'embed CHECKPOINT tfds:cifar10': 'embed CHECKPOINT digits',
    'export runs/digits digits/': 'export runs/digits exported/',
    "'train[:2000]'": 'train',
    '[:200 per class]': '[:2 per class]',
    '[:500 per class]': '[:2 per class]',
    '--image-size 112': '--image-size 32',
    '--image-size 224': '--image-size 32',
    '--image-size 448': '--image-size 32',
    'b16 tfds:cifar10 --split test': 'b16 folder:data/flowers',
    'tfds:cifar10': 'scenes:20',
    "'train[:90%]'": 'train',
    '--size 8000': '--size 60',
    '--n-best 3': '--n-best 2',
    '--points 12 --curves 3': '--points 12 --curves 1',
    '--curves 40 --bootstrap 30': '--curves 2 --bootstrap 2',
    '--layer 2': '--layer 0',
    '--layer -4..-1': '--layer -1',
    'width=512,height=384': 'width=48,height=32',
    '/scratch/': 'scratch/',
    '/data/': 'data/',
}
PHOTOS = (
    'a.png',
    'b.png',
    'photo.jpg',
    'china.jpg',
    'flower.jpg',
    'chelsea.png',
    'coffee.png',
    'old.png',
    'digit.png',
    'astronaut.png',
    'rocket.png',
)


def stage(line: str) -> tuple[int, str]:
    """Rank a line in the order in which lines write what others read."""
    stages = ('sweep create', 'scaling study', 'sweep work', 'scaling collect')
    return next((i for i, start in enumerate(stages) if line.startswith(start)), len(stages)), line


CHOSEN = sorted((line for line in LINES if line.split()[0] not in ELSEWHERE), key=stage)


@pytest.fixture(scope='module')
def place(tmp_path_factory, translating_run):
    """A folder with all that the documents suppose, but for the runs."""
    folder = tmp_path_factory.mktemp('documents')
    (folder / 'experiments').symlink_to(ROOT / 'experiments')
    (folder / 'docs' / 'gallery').mkdir(parents=True)
    for table in (ROOT / 'docs').glob('scaling_*.csv'):
        shutil.copy(table, folder / 'docs')
    (folder / 'runs').mkdir()
    shutil.copytree(translating_run, folder / 'runs' / 'multi30k')
    rng = np.random.default_rng(0)
    for name in (*PHOTOS, *(f'runs/scene_{i}.png' for i in range(6))):
        Image.fromarray(rng.integers(0, 256, (40, 48, 3), np.uint8)).save(folder / name)
    for name in ('rose', 'tulip'):
        (folder / 'data' / 'flowers' / name).mkdir(parents=True)
        for photo in PHOTOS:
            shutil.copy(folder / photo, folder / 'data' / 'flowers' / name / photo)
    for language in ('en', 'de'):
        text = ''.join(f'sentence {i} of many words, in {language}.\n' for i in range(300))
        (folder / 'data' / f'train.{language}').write_text(text)
    for name in ('photos', 'more/sub'):
        (folder / name).mkdir(parents=True)
        for photo in ('a.png', 'b.png'):
            shutil.copy(folder / photo, folder / name)
    (folder / 'in.txt').write_text('A dog runs.\n')
    model = dict(num_classes=10, **vit.variant('mu/16'))
    params = jax.jit(vit.Model(**model).init)(jax.random.key(0), jax.numpy.zeros((1, 32, 32, 3)))
    flat = vision_transformer.write(params['params'], {'name': 'vit', **model})
    files.write_npz(folder / 'ViT-B_16.npz', flat)
    interop.write(interop.read(folder / 'ViT-B_16.npz', image_size=(32, 32)), folder / 'vit_hf')
    of_hub = {path.name: path.read_bytes() for path in (folder / 'vit_hf').iterdir()}
    with hub_server.serve(hub_server.Hub(), folder / 'hub') as hub:
        hub.add('google/vit-base-patch16-224', of_hub)
        hub.add('facebook/dinov2-small', of_hub)
        # A file of this name comes before the bucket, and the word means any checkpoint.
        for name in (AUGREG, 'CHECKPOINT'):
            shutil.copytree(folder / 'vit_hf', folder / name)
        yield folder


def small(line: str) -> list[str]:
    """The words of a command at its smoke size."""
    line = re.sub(r'(experiments/\S+\.py)(?!\S*smoke)\S*', r'\1:smoke', line)
    line = re.sub(r" --config\.data[^=]*=('[^']*'|\S+)", '', line)
    line = re.sub(r"'A brown dog [^']*'", "'A dog runs.'", line)
    line = re.sub(r'runs/(scene|ground|pair)_\{\S+\}\.png', 'runs/scene_0.png', line)
    for large, size in SIZES.items():
        line = line.replace(large, size)
    return shlex.split(line)


@pytest.mark.parametrize('line', CHOSEN)
def test_it_runs(line, place, monkeypatch, capsys, one_device):
    for pattern, reason in NOT_HERE.items():
        if re.search(pattern, line):
            pytest.skip(f'needs {reason}')
    if '--format onnx' in line:
        pytest.importorskip('jax2onnx')
    monkeypatch.chdir(place)
    for name in re.findall(r'runs/([a-z0-9_/]+)', line):
        if name in EXPERIMENT_OF and not pathlib.Path('runs', name, 'result.json').exists():
            experiment = f'experiments/{EXPERIMENT_OF[name]}'
            argv = ['train', '--config', experiment, '--workdir', f'runs/{name}']
            assert __main__.main([*argv, *TRAINED_WITH.get(name, [])]) == 0
    capsys.readouterr()
    argv = small(line)
    outs = [pathlib.Path(b) for a, b in itertools.pairwise(argv) if a in WRITES]
    for out in outs:  # of another command, which some would not replace
        if out.is_file():
            out.unlink()
    assert __main__.main(argv) == 0
    assert capsys.readouterr().out
    assert all(out.exists() for out in outs)
