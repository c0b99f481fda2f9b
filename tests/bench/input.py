"""Images that one CPU core reads, decodes and transforms in a second, beside tf.data and OpenCV.

    python tests/bench/input.py FOLDER --tensorflow ~/tf/bin/python --against ../before --rounds 5

FOLDER holds JPEG files, of ImageNet for numbers that can be compared. Rates are images by seconds
of CPU time, of all threads of a process, so that another load on the machine changes them little.
Each side has a process of its own: this package, with the malloc that its commands ask for; that
of another checkout, `--against`; tf.data with the functions that big_vision's pipelines call, in an
environment that has TensorFlow, `--tensorflow`; and simplejpeg with OpenCV, bare calls without a
pipeline, if there is OpenCV. They take turns in every round, in reversed order in every other one.

decode      a file to RGB bytes
crop        a random window resized to 224 x 224, and flipped or not
recipe      that and RandAugment as in `experiments/vit/imagenet2012.py`
evaluation  the shorter side resized to 256, and the middle cropped
"""

from __future__ import annotations

import argparse
import atexit
import importlib.metadata
import importlib.util
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
from collections.abc import Callable, Iterable

PACKAGES = ('simplejpeg', 'pillow', 'numpy', 'scipy', 'opencv-python-headless', 'tensorflow-cpu')
TRANSFORMS = {
    'decode': '',
    'crop': 'inception_crop_tf(224)|flip',
    'recipe': "inception_crop_tf(224)|flip|randaugment(2, 10, variant='big_vision')",
    'evaluation': 'resize_small_tf(256)|central_crop(224)',
}
TASKS = tuple(TRANSFORMS)
# Reads and transforms every file once.
Pass = Callable[[], Iterable]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--tensorflow', metavar='PYTHON', help='an interpreter with TensorFlow')
    parser.add_argument('--against', type=pathlib.Path, help='another checkout of this project')
    parser.add_argument('--rounds', type=int, default=5)
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
    return subprocess.Popen(
        [python, '-P', __file__, str(args.folder.resolve()), '--serve', side],
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
                rate = ask(sides[side], task)
                if rate and number >= 0:
                    rates[task].setdefault(side, []).append(rate)
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
    files = sorted(map(str, args.folder.iterdir()))
    passes = SIDES[args.serve](args.folder, files)
    for line in sys.stdin:
        one = passes.get(line.strip())
        print(len(files) / seconds(one) if one else 0, flush=True)


def seconds(one: Pass) -> float:
    """CPU seconds of a pass."""
    start = time.process_time()
    for image in one():
        if image.shape[-1] != 3:
            raise SystemExit(f'an image of shape {image.shape}')
    return time.process_time() - start


def of_vit_jax(folder: pathlib.Path, files: list[str]) -> dict[str, Pass]:
    from vit_jax.data.plans.base import Examples
    from vit_jax.data.sources import open_source
    from vit_jax.data.transforms import parse_transforms

    classes = pathlib.Path(tempfile.mkdtemp())  # the source wants a folder for every class
    atexit.register(shutil.rmtree, classes)
    (classes / 'all').symlink_to(folder)
    source = open_source(f'folder:{classes}', 'train')

    def pass_of(spec: str) -> Pass:
        examples = Examples(source, parse_transforms(spec))
        return lambda: (examples.read(i, 0, i)['image'] for i in range(len(examples)))

    return {task: pass_of(spec) for task, spec in TRANSFORMS.items()}


def of_tf_data(folder: pathlib.Path, files: list[str]) -> dict[str, Pass]:
    import tensorflow as tf

    def decode(path):
        return tf.io.decode_jpeg(tf.io.read_file(path), channels=3)

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
        image = decode(path)
        size = tf.cast(tf.shape(image)[:2], tf.float32)
        size = tf.cast(tf.round(size * 256 / tf.reduce_min(size)), tf.int32)
        image = to_bytes(tf.image.resize(image, size, method='area'))
        y, x = (size[0] - 224) // 2, (size[1] - 224) // 2
        return image[y : y + 224, x : x + 224]

    def pass_of(function) -> Pass:
        data = tf.data.Dataset.from_tensor_slices(files).map(function, num_parallel_calls=1)
        return data.as_numpy_iterator

    steps = {'decode': decode, 'crop': crop, 'evaluation': evaluation}
    return {task: pass_of(function) for task, function in steps.items()}


def of_opencv(folder: pathlib.Path, files: list[str]) -> dict[str, Pass]:
    import cv2
    import numpy as np
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

    steps = {'decode': decode, 'crop': crop, 'evaluation': evaluation}
    return {task: lambda step=step: map(step, files) for task, step in steps.items()}


SIDES = {'vit_jax': of_vit_jax, 'tf.data': of_tf_data, 'simplejpeg + cv2': of_opencv}

if __name__ == '__main__':
    main()
