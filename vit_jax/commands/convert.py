"""Convert weights between this package, vision_transformer, big_vision, transformers and timm.

A file that is written in the form in which it was read comes back bit for bit.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from vit_jax.commands._model import MODEL
from vit_jax.commands._parser import Parser, add_allow_flag, check_output
from vit_jax.errors import UserError

SUFFIXES = ('.npz', '.safetensors')
WEIGHTS_FORMS = (
    'FILE.npz for vision_transformer and big_vision (a run of BiT gets the names of the released '
    'files); FILE.safetensors or a new folder for transformers; FAMILY:PATH for the names of '
    'another family, such as timm_vit:FOLDER, open_clip:FOLDER or authors_detr:FILE; peft:FOLDER '
    'for the adapters of a run of config.lora'
)


def main(argv: Sequence[str]) -> int:
    """Write one file or folder, and print a line about its contents.

    Raises:
      UserError: The target exists already, or its suffix is not a format of weights.
    """
    parser = Parser('convert', __doc__)
    parser.add_argument(
        'src',
        help=MODEL,
    )
    parser.add_argument('dst', help=WEIGHTS_FORMS)
    add_allow_flag(parser)
    args = parser.parse_args(argv)
    check_target(args.dst, 'dst')
    from vit_jax.inference import load

    write(load.read(args.src, allowed=args.allow), args.dst, args.src)
    return 0


def check_target(dst: str, flag: str) -> None:
    """Check that weights can be written to `dst`, and that nothing is there.

    Raises:
      UserError: names the file, or `flag`.
    """
    from vit_jax.storage.model_ref import ModelRef

    target_path = ModelRef.parse(dst).place
    ending = pathlib.Path(target_path).suffix
    if ending[1:].isalpha() and ending not in SUFFIXES and not pathlib.Path(target_path).is_dir():
        raise UserError(
            f'{target_path}: weights cannot be written as {ending}; name an .npz or .safetensors '
            'file, '
            'or a folder'
        )
    check_output(
        pathlib.Path(target_path) / 'model' if ending not in SUFFIXES else target_path, flag
    )
    if existing := [path for path in output_files(pathlib.Path(target_path)) if path.exists()]:
        raise UserError(f'{existing[0]} already exists: choose another name or remove it')


def write(trained: Any, dst: str, title: str) -> None:
    """Write a model to `dst`, and print its contents and notes; `title` begins the first line.

    Of a model that no family writes, such as the student of a DINOv2, it is the encoder.
    """
    import jax

    from vit_jax.inference import load
    from vit_jax.interop import checkpoint, families
    from vit_jax.storage.model_ref import ModelRef

    if not families.writers(str(trained.settings.model.name)):
        trained = load.backbone(trained)
    notes = checkpoint.write(trained, dst)
    count = sum(x.size for x in jax.tree.leaves(trained.params))
    size = ' for {1} x {0} images'.format(*trained.image_size) if trained.image_size else ''
    name = trained.settings.model.name
    print(f'{title}: {trained.source}: {name}{size}, {count:,} parameters')
    print(f'{ModelRef.parse(dst).place}: written')
    for note in (*trained.notes, *notes):
        print(f'note: {note}')


def output_files(dst: pathlib.Path) -> list[pathlib.Path]:
    """List the files that writing to `dst` creates."""
    if dst.suffix == '.npz':
        return [dst]
    from vit_jax.interop.hub import BESIDE, OPEN_CLIP_WEIGHTS, WEIGHTS

    files = [dst] if dst.suffix == '.safetensors' else [dst / WEIGHTS, dst / OPEN_CLIP_WEIGHTS]
    return [*files, *map(files[0].with_name, BESIDE)]
