"""Flags that name a model: of a run, or of a checkpoint of another code base."""

from __future__ import annotations

import argparse
import re
from typing import Any

from vit_jax.commands._parser import add_allow_flag
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
