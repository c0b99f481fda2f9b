"""Flags that name a model: of a run, or of a checkpoint of another code base."""

from __future__ import annotations

import argparse
import io
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vit_jax.commands._parser import add_allow_flag, check_output, writing
from vit_jax.errors import UserError, positive


def add_run_flags(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add the flags for a run and its checkpoint."""
    parser.add_argument('--workdir', required=required, metavar='DIR', help='a run folder')
    parser.add_argument(
        '--step',
        type=_step,
        metavar='STEP|best',
        help='a kept checkpoint, or the best one of config.checkpoint.keep_best; the newest by '
        'default',
    )
    parser.add_argument(
        '--average',
        type=positive,
        default=1,
        metavar='N',
        help='the mean of so many kept checkpoints, the last of which is that of --step',
    )
    add_allow_flag(parser)


def run_options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of `add_run_flags` as keywords of `inference.load.open_run`."""
    return {'step': args.step, 'average': args.average, 'allowed': args.allow}


def _step(text: str) -> int | str:
    if text == 'best':
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step's number nor best") from None


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `open_model` reads."""
    add_run_flags(parser, required=False)
    parser.add_argument(
        '--checkpoint',
        metavar='FILE',
        help='instead of a run the weights of another code base: .npz, .safetensors, a folder, or '
        'a URL such as hf://google/vit-base-patch16-224; '
        'RUN/checkpoints/STEP is that run at this step',
    )
    parser.add_argument(
        '--image-size',
        metavar='PIXELS|HxW',
        help="crop and resize to this instead of the model's own size; shrink or enlarge, and pad, "
        'where the run pads its images',
    )


def open_model(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    """The `TrainedModel` of the flags.

    Args:
      parser: for its name.
      args: with the flags of `add_model_flags`.

    Raises:
      UserError: if not exactly one model is named, it cannot be read, or as
        `runtime.mesh.usable_devices`.
    """
    check_model_flags(parser, args)
    size = image_size(args)
    from vit_jax.inference import load
    from vit_jax.runtime import mesh

    mesh.usable_devices()
    if args.checkpoint is not None:
        stored = getattr(args, 'stored', None)
        return load.open_model(args.checkpoint, size, allowed=args.allow, stored=stored)
    return load.open_run(args.workdir, size, **run_options(args))


def task_name(args: argparse.Namespace) -> str:
    """The task of the flags' model; reads a checkpoint once, into `args.stored`.

    Raises:
      UserError: if the folder holds no run, the checkpoint cannot be read, its config names code
        that is not allowed, or as `runtime.mesh.usable_devices`.
    """
    from vit_jax.inference import load
    from vit_jax.runtime import mesh

    mesh.usable_devices()
    if args.workdir is not None:
        return load.read_config(args.workdir, args.allow).task.name
    args.stored = load.read(args.checkpoint, image_size=image_size(args), allowed=args.allow)
    return args.stored.config.task.name


def check_model_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Raises UserError unless exactly one model is named."""
    if (args.workdir is None) == (args.checkpoint is None):
        parser.error('give one of --workdir DIR and --checkpoint FILE')
    if args.checkpoint is not None and (args.step is not None or args.average != 1):
        parser.error('--step and --average are of a run: give them with --workdir')


def image_size(args: argparse.Namespace) -> tuple[int, int] | None:
    """Height and width: `224` -> (224, 224), `224x320` -> (224, 320), None without the flag.

    Raises:
      UserError: for anything else.
    """
    if (text := args.image_size) is None:
        return None
    match = re.fullmatch(r'([1-9]\d*)(?:x([1-9]\d*))?', text)
    if match is None:
        raise UserError(
            f'--image-size {text}: write the side in pixels, or HEIGHTxWIDTH, as in 224x320'
        )
    height, width = int(match[1]), int(match[2] or match[1])
    from vit_jax.data.images import MAX_PIXELS

    if height * width > MAX_PIXELS:
        raise UserError(f'--image-size {text}: more than {MAX_PIXELS:,} pixels are refused')
    return height, width


def add_bootstrap_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--bootstrap`."""
    words = 'for the bands (default: %(default)s)'
    parser.add_argument('--bootstrap', type=int, default=100, metavar='N', help=words)


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json` for `show`."""
    words = 'print JSON, or write it besides'
    parser.add_argument('--json', nargs='?', const='-', metavar='FILE', help=words)


def check(args: argparse.Namespace) -> None:
    """Raise UserError if `--target` or `--bootstrap` is out of range."""
    require_positive(args.target, '--target')
    require_count(args.bootstrap, '--bootstrap')


def require_positive(value: float | None, flag: str) -> None:
    """Raise UserError unless the value is positive and finite, or None."""
    if value is not None and not 0 < value < float('inf'):
        raise UserError(f'{flag} {value:g}: must be positive')


def require_count(value: int, flag: str) -> None:
    """Raise UserError for a negative number."""
    if value < 0:
        raise UserError(f'{flag} {value}: must be at least 0')


def names(text: str) -> tuple[str, ...]:
    """'a,b' -> ('a', 'b')."""
    return tuple(name.strip() for name in text.split(',') if name.strip())


def show(summary: Mapping[str, Any], where: str | None, table: Callable[[], None]) -> None:
    """Print the table, or the summary as JSON if `where` is '-'; write that to any other path.

    Raises:
      UserError: if it cannot be written.
    """
    text = json.dumps(summary, indent=2, allow_nan=False) + '\n'
    if where == '-':
        print(text, end='')
        return
    if where:
        write(where, text, '--json')
    table()


def write(path: str | pathlib.Path, text: str, flag: str) -> None:
    """Write a file, and make its folder.

    Raises:
      UserError: if it cannot be written.
    """
    from vit_jax.storage.paths import write_text_atomic

    path = pathlib.Path(path)
    with writing(path, flag):
        write_text_atomic(path, text)


def save_figure(figure: Any, path: str | pathlib.Path, flag: str) -> Any:
    """Writes a figure, and returns its path.

    Raises:
      UserError: if it cannot be written; names `flag`, which gave the path.
    """
    from vit_jax.viz import figures

    with writing(path, flag):
        return figures.save(figure, path)


def check_picture(path: str | pathlib.Path, flag: str) -> None:
    """Raise UserError that names the flag if the picture it gives has another format, or could not
    be written.
    """
    from vit_jax.viz import figures

    figures.check_format(path, flag)
    check_output(path, flag)


def is_folder(out: str) -> bool:
    """Whether `--out` names a folder for images, not a single picture of all."""
    from vit_jax.storage import paths

    path = paths.path(out)
    return path.is_dir() or not path.suffix


def image_names(files: Sequence[str | pathlib.Path], samples: int | None = None) -> list[str]:
    """NAME.png for each file, or NAME_0.png, NAME_1.png, ... for its samples."""
    endings = [''] if samples is None else [f'_{i}' for i in range(samples)]
    return [f'{pathlib.Path(file).stem}{ending}.png' for file in files for ending in endings]


def save_images(images: Iterable[Any], names: Sequence[str], folder: str, flag: str) -> Any:
    """Writes images, and returns the folder.

    Args:
      images: uint8 [Y X 3]; the next is made when the last is written.
      names: of `image_names`.
      folder: made if missing.
      flag: that named the folder.

    Raises:
      UserError: if one cannot be written.
    """
    from PIL import Image

    from vit_jax.storage import paths

    target = paths.path(folder)
    with writing(folder, flag):
        paths.make_folder(target)
        for image, name in zip(images, names, strict=True):
            encoded = io.BytesIO()
            Image.fromarray(image).save(encoded, format='png')
            paths.write_atomic(target / name, encoded.getvalue())
    return target


def check_names(
    names: Sequence[str], files: Sequence[str | pathlib.Path], folder: str, flag: str
) -> None:
    """Raises UserError if `save_images` would overwrite one of the files, or one of its images."""
    taken = {pathlib.Path(file).resolve() for file in files}
    for name in names:
        path = (pathlib.Path(folder) / name).resolve()
        if path in taken:
            raise UserError(
                f'{flag} {folder!r}: {name} is a file given, or that of another one: choose '
                'another folder, or give one file of a name'
            )
        taken.add(path)
