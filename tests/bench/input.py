"""Images that one CPU core reads, decodes, transforms and batches in a second, beside tf.data.

    python tests/bench/input.py FOLDER --tensorflow ~/tf/bin/python --against ../before --rounds 5

FOLDER holds JPEG files, of ImageNet for numbers that can be compared. Each side is a whole pipeline
as its users set it up, shuffled, endless and in batches, in a process of its own that is bound to
one core: this package's training batches, with the malloc that its commands ask for; those of
another checkout, `--against`; tf.data with the functions that big_vision's pipelines call, a
private pool of one thread and autotuned prefetching, in an environment that has TensorFlow,
`--tensorflow`; and simplejpeg with OpenCV, bare calls whose images are stacked, if there is OpenCV.
They take turns in every round, in reversed order in every other one. Rates are images by seconds of
CPU time, of all threads of a process, so that another load on the machine changes them little.

crop        a random window resized to 224 x 224, and flipped or not
recipe      that and RandAugment as in `experiments/vit/imagenet2012.py`
evaluation  the shorter side resized to 256, and the middle cropped
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np

PACKAGES = ('simplejpeg', 'pillow', 'numpy', 'scipy', 'opencv-python-headless', 'tensorflow-cpu')
TRANSFORMS = {
    'crop': 'inception_crop_tf(224)|flip',
    'recipe': "inception_crop_tf(224)|flip|randaugment(2, 10, variant='big_vision')",
    'evaluation': 'resize_small_tf(256)|central_crop(224)',
}
TASKS = tuple(TRANSFORMS)
BATCH = 25
AHEAD = 6  # batches that may lie ready when a measurement begins
Pipelines = dict[str, Callable[[], Iterator[np.ndarray]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--tensorflow', metavar='PYTHON', help='an interpreter with TensorFlow')
    parser.add_argument('--against', type=pathlib.Path, help='another checkout of this project')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--batches', type=int, default=20, help='of 25 images, a round')
    parser.add_argument('--tasks', nargs='+', choices=TASKS, default=TASKS)
    parser.add_argument('--json', type=pathlib.Path, help='write all numbers to a file')
    parser.add_argument('--serve', choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    rates = measure(start(args), args)
    print_table(rates)
    if args.json:
        args.json.write_text(json.dumps({'cpu': cpu(), 'rates': rates}, indent=1) + '\n')


def start(args: argparse.Namespace) -> dict[str, subprocess.Popen]:
    """The processes of all sides by their names."""
    root = pathlib.Path(__file__).resolve().parents[2]
    sides = {'vit_jax': start_one(args, 'vit_jax', sys.executable, root)}
    if args.against:
        sides['before'] = start_one(args, 'vit_jax', sys.executable, args.against.resolve())
    if args.tensorflow:
        sides['tf.data'] = start_one(args, 'tf.data', args.tensorflow, root)
    if importlib.util.find_spec('cv2'):
        sides['simplejpeg + cv2'] = start_one(args, 'simplejpeg + cv2', sys.executable, root)
    return sides


def start_one(args, side: str, python: str, checkout: pathlib.Path) -> subprocess.Popen:
    # Here, for the other sides import another checkout, or none.
    from vit_jax.runtime.environment import MALLOC_TUNABLES, MALLOC_VARIABLE

    own = {'PYTHONPATH': str(checkout), 'TF_CPP_MIN_LOG_LEVEL': '3'}
    if side == 'vit_jax':
        own |= {MALLOC_VARIABLE: MALLOC_TUNABLES}
    environment = os.environ | own
    words = [str(args.folder.resolve()), '--batches', str(args.batches)]
    return subprocess.Popen(
        [python, '-P', __file__, *words, '--serve', side],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(sides: dict[str, subprocess.Popen], args) -> dict[str, dict[str, list[float]]]:
    """Images a CPU second {task: {side: of each round}}."""
    rates: dict[str, dict[str, list[float]]] = {task: {} for task in args.tasks}
    for task in args.tasks:
        for number in range(-1, args.rounds):  # the first is a warm-up
            for side in list(sides)[:: -1 if number % 2 else 1]:
                found = ask(sides[side], task)
                if found and number >= 0:
                    rates[task].setdefault(side, []).append(found)
    for process in sides.values():
        process.stdin.close()
        process.wait()
    return rates


def ask(process: subprocess.Popen, task: str) -> float:
    print(task, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f'a side ended in {task}, see above')
    return float(answer)


def print_table(rates: dict[str, dict[str, list[float]]]) -> None:
    versions = [f'{name} {version}' for name in PACKAGES if (version := installed(name))]
    print(f'Images a CPU second of {cpu()}, {", ".join(versions)}; medians (least to most)\n')
    sides = list(dict.fromkeys(side for found in rates.values() for side in found))
    print(f'| | {" | ".join(sides)} |\n|---|{"---|" * len(sides)}')
    for task, found in rates.items():
        cells = [cell(found[side]) if side in found else '' for side in sides]
        print(f'| {task} | {" | ".join(cells)} |')
    for other in sides[1:]:
        ratios = [
            f'{task} {statistics.median(found["vit_jax"]) / statistics.median(found[other]):.2f}'
            for task, found in rates.items()
            if other in found
        ]
        print(f'\nvit_jax / {other}: {", ".join(ratios)}')


def cell(rates: list[float]) -> str:
    return f'{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})'


def installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ''


def cpu() -> str:
    found = pathlib.Path('/proc/cpuinfo')
    lines = found.read_text().splitlines() if found.exists() else []
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return f'{names[0] if names else platform.processor()} ({os.cpu_count()} cores)'


def serve(args: argparse.Namespace) -> None:
    """Answer each task on standard input by its rate, 0 for one that this side has not."""
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    files = sorted(map(str, args.folder.iterdir()))
    pipelines = SIDES[args.serve](args.folder, files)
    for line in sys.stdin:
        task = line.strip()
        print(rate(pipelines[task], args.batches) if task in pipelines else 0, flush=True)


def rate(pipeline: Callable[[], Iterator[np.ndarray]], batches: int) -> float:
    """Images a CPU second, after the batches that lie ready at first."""
    made = pipeline()
    for _ in range(AHEAD):
        next(made)
    start = time.process_time()
    for _ in range(batches):
        images = next(made)
        if images.shape != (BATCH, 224, 224, 3):
            raise SystemExit(f'a batch of shape {images.shape}')
    spent = time.process_time() - start
    if hasattr(made, 'close'):
        made.close()
    return batches * BATCH / spent


def of_vit_jax(folder: pathlib.Path, files: list[str]) -> Pipelines:
    from vit_jax.config.run import Data
    from vit_jax.data.dataset import open_dataset

    classes = pathlib.Path(tempfile.mkdtemp())  # the source wants a folder for every class
    atexit.register(shutil.rmtree, classes)
    (classes / 'all').symlink_to(folder)

    def batches_of(transforms: str) -> Iterator[np.ndarray]:
        data = open_dataset(
            Data(source=f'folder:{classes}', split='train', transforms=transforms, threads=1), BATCH
        )
        with contextlib.closing(data.train_batches()) as batches:
            for batch in batches:
                yield batch['image']

    return {task: functools.partial(batches_of, spec) for task, spec in TRANSFORMS.items()}


def of_tf_data(folder: pathlib.Path, files: list[str]) -> Pipelines:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    def to_bytes(image):
        return tf.cast(image, tf.uint8)

    def crop(path):
        data = tf.io.read_file(path)
        shape = tf.io.extract_jpeg_shape(data)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape, tf.zeros([0, 0, 4]), area_range=(0.05, 1.0), use_image_if_no_bounding_boxes=True
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        image = tf.io.decode_and_crop_jpeg(data, window, channels=3)
        return tf.image.random_flip_left_right(to_bytes(tf.image.resize(image, (224, 224))))

    def evaluation(path):
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        size = tf.cast(tf.shape(image)[:2], tf.float32)
        size = tf.cast(tf.round(size * 256 / tf.reduce_min(size)), tf.int32)
        image = to_bytes(tf.image.resize(image, size, method='area'))
        y, x = (size[0] - 224) // 2, (size[1] - 224) // 2
        return image[y : y + 224, x : x + 224]

    def batches_of(function) -> Iterator[np.ndarray]:
        options = tf.data.Options()
        options.threading.private_threadpool_size = 1
        data = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).repeat()
        data = data.map(function, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH)
        return data.prefetch(tf.data.AUTOTUNE).with_options(options).as_numpy_iterator()

    steps = {'crop': crop, 'evaluation': evaluation}
    return {task: functools.partial(batches_of, function) for task, function in steps.items()}


def of_opencv(folder: pathlib.Path, files: list[str]) -> Pipelines:
    import cv2
    import simplejpeg

    from vit_jax.data.transforms.windows import distorted_window

    cv2.setNumThreads(0)
    rng = np.random.default_rng(0)

    def decode(path):
        return simplejpeg.decode_jpeg(pathlib.Path(path).read_bytes())

    def crop(path):
        image = decode(path)
        y, x, h, w = distorted_window(rng, image.shape[:2], (0.05, 1.0))
        image = cv2.resize(image[y : y + h, x : x + w], (224, 224))
        return cv2.flip(image, 1) if rng.random() < 0.5 else image

    def evaluation(path):
        image = decode(path)
        scale = 256 / min(image.shape[:2])
        h, w = (round(side * scale) for side in image.shape[:2])
        image = cv2.resize(image, (w, h), interpolation=cv2.INTER_AREA)
        y, x = (h - 224) // 2, (w - 224) // 2
        return image[y : y + 224, x : x + 224]

    def batches_of(step) -> Iterator[np.ndarray]:
        images = map(step, itertools.cycle(files))
        while True:
            yield np.stack(list(itertools.islice(images, BATCH)))

    steps = {'crop': crop, 'evaluation': evaluation}
    return {task: functools.partial(batches_of, step) for task, step in steps.items()}


SIDES = {'vit_jax': of_vit_jax, 'tf.data': of_tf_data, 'simplejpeg + cv2': of_opencv}

if __name__ == '__main__':
    main()
