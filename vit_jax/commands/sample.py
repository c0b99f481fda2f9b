"""Sample new images from a run that learned to generate them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vit_jax.commands._model import add_run_flags, run_options
from vit_jax.commands._parser import (
    Parser,
    add_json_flag,
    check_output,
    check_picture,
    is_folder,
    save_figure,
    save_images,
    writing,
)
from vit_jax.errors import UserError, nearest, positive_number

FRAMES = 8  # most frames of a trajectory
MOST_DRAWN = 1000  # most images in a picture
ACROSS = 16  # most images in a row of a picture


def main(argv: Sequence[str]) -> int:
    """Write the images of `--out`: a picture of all, a file for each, or an array of all."""
    args = parse_args(argv)
    from vit_jax.inference import sample
    from vit_jax.inference.load import open_run
    from vit_jax.runtime import compile_cache, console, mesh
    from vit_jax.viz.photo import with_sampling_flags

    mesh.usable_devices()
    run = open_run(args.workdir, **run_options(args))
    sample.check_task(run)
    run = run.adapted(task=with_sampling_flags(run.task, args))
    classes = sample.check_classes(parse_classes(args.classes, run.class_names), run)
    total = len(classes) * args.count
    if args.trajectory and run.task.steps == 1:
        raise UserError('--trajectory: one step has no intermediate images: give --steps 2 or more')
    frames = min(FRAMES, run.task.steps - 1) if args.trajectory else 0
    times = (run.task.frame_steps(frames) / run.task.steps).tolist()
    write = make_writer(args, total, run.class_names, times)
    if args.draws and total > MOST_DRAWN:
        raise UserError(f'--out {args.out}: {total:,} images are too many for one: name a folder')
    compile_cache.enable()
    options: dict[str, Any] = {'seed': args.seed, 'frames': frames, 'batch_size': args.batch_size}
    batches = sample.sample(run, classes, args.count, **options)
    with console.progress('images', total, quiet=args.json) as advance:

        def counted() -> Iterator[Any]:
            for batch in batches:
                advance(len(batch.images))
                yield batch

        write(counted())
    if args.json:
        row = {'step': run.step, 'images': total, 'classes': list(classes), 'seed': args.seed}
        task = {name: getattr(run.task, name) for name in ('sampler', 'steps', 'guidance')}
        print(json.dumps({**row, **task, 'out': args.out}))
    else:
        print(args.out)
    return 0


def make_writer(
    args: argparse.Namespace, total: int, names: Sequence[str], times: Sequence[float]
) -> Callable[[Iterator[Any]], None]:
    """Make the function that writes batches to `--out`.

    Args:
      args: Flags.
      total: Number of images.
      names: Class names.
      times: Times of the frames.
    """
    if args.draws:
        return lambda batches: write_picture(args.out, list(batches), names, times)
    return folder_writer(args.out) if is_folder(args.out) else npz_writer(args.out, total)


def folder_writer(out: str) -> Callable[[Iterator[Any]], None]:
    """Make a function that writes an image for each sample, such as `0003_00012.png`.

    Names consist of the class and the number of the sample.
    """

    def write(batches: Iterator[Any]) -> None:
        from vit_jax.viz import figures

        for batch in batches:
            pairs = zip(batch.labels, batch.numbers, strict=True)
            files = [f'{"none" if a < 0 else f"{a:04d}"}_{b:05d}.png' for a, b in pairs]
            save_images(map(figures.as_picture, batch.images), files, out, '--out')

    return write


def npz_writer(out: str, total: int) -> Callable[[Iterator[Any]], None]:
    """Make a function that writes all samples as an array, see `inference.sample.write_npz`."""

    def write(batches: Iterator[Any]) -> None:
        from vit_jax.inference import sample

        with writing(out, '--out'):
            sample.write_npz(out, batches, total)

    return write


def write_picture(
    out: str, batches: Sequence[Any], names: Sequence[str], times: Sequence[float]
) -> None:
    """Draw the samples of each class in rows, or, with frames, a row for each sample."""
    from vit_jax.viz import generate

    samples = [row for batch in batches for row in zip(*batch, strict=True)]
    labels = [int(label) for _, _, label, _ in samples]
    if times:
        titles = [generate.class_name(label, names) for label in labels]
        frames, images = [row[1] for row in samples], [row[0] for row in samples]
        figure = generate.draw_trajectories(frames, images, times, titles)
    else:
        rows: dict[int, list[Any]] = {label: [] for label in labels}
        for image, _, label, _ in samples:
            rows[int(label)].append(image)
        cut = [
            (generate.class_name(label, names), images[first : first + ACROSS])
            for label, images in rows.items()
            for first in range(0, len(images), ACROSS)
        ]
        figure = generate.draw_grid([row for _, row in cut], [name for name, _ in cut])
    save_figure(figure, out, '--out')


def parse_classes(text: str | None, names: Sequence[str]) -> tuple[int, ...]:
    """Parse numbers or names of classes: '3,cat,none' -> (3, 5, -1); empty without a text.

    Raises:
      UserError: A word is neither a number nor a name.
    """
    numbers = {'none': -1} | {name: number for number, name in enumerate(names)}
    classes = []
    for word in [] if text is None else text.split(','):
        word = word.strip()
        if word.isdecimal():
            classes.append(int(word))
        elif word in numbers:
            classes.append(numbers[word])
        else:
            raise UserError(f'--classes {text!r}: {nearest("class", word, numbers)}')
    return tuple(dict.fromkeys(classes))


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags, with `draws`: whether `--out` is a picture.

    Raises:
      UserError: Not exactly one run is named, or `--out` cannot be written.
    """
    from vit_jax.viz.photo import add_sampling_flags  # which imports no JAX

    parser = Parser('sample', __doc__)
    add = parser.add_argument
    add_run_flags(parser, argv)
    classes = "class numbers or names, such as 3,7 or cat; 'none' for no class (default: all)"
    add('--classes', metavar='A,B', help=classes)
    add('--count', type=positive_number, default=8, help='images per class (default: 8)')
    add('--seed', type=int, default=0, help='random seed of the noise (default: 0)')
    add_sampling_flags(parser)
    add(
        '--batch-size',
        type=positive_number,
        default=64,
        help='images per batch, over all devices (default: 64)',
    )
    add('--trajectory', action='store_true', help='draw the intermediate predictions, too')
    add(
        '--out',
        required=True,
        help='picture to write (PNG, SVG, PDF or JPEG); a folder of images; or an .npz file with '
        'the array arr_0, which tools for Frechet inception distances read',
    )
    add_json_flag(parser)
    args = parser.parse_args(argv)
    args.draws = not (args.out.endswith('.npz') or is_folder(args.out))
    if args.draws:
        check_picture(args.out, '--out')
    elif not is_folder(args.out):
        check_output(args.out, '--out')
    if args.trajectory and not args.draws:
        raise UserError('--trajectory is drawn: give --out a picture, such as trajectory.png')
    return args
