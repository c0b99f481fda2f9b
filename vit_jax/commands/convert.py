"""Convert weights between this package, vision_transformer, big_vision and transformers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.commands._parser import Parser
from vit_jax.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Writes one file or folder, and says what is in it."""
    parser = Parser('convert', __doc__)
    parser.add_argument(
        'src',
        help='a run folder or its checkpoints/STEP, an .npz or .safetensors file, or a folder',
    )
    parser.add_argument(
        'dst',
        help='FILE.npz for vision_transformer and big_vision (the released naming for BiT); '
        'FILE.safetensors or a new folder for transformers',
    )
    args = parser.parse_args(argv)
    dst = pathlib.Path(args.dst)
    if existing := [path for path in targets(dst) if path.exists()]:
        raise UserError(f'{existing[0]} is already there: choose another name or remove it')
    import jax

    from vit_jax.interop import load

    foreign = load.read(args.src)
    notes = writer(dst)(foreign, dst)
    count = sum(x.size for x in jax.tree.leaves(foreign.params))
    size = ' for {} x {} images'.format(*foreign.image_size) if foreign.image_size else ''
    print(f'{args.src}: {foreign.source}: {foreign.family}{size}, {count:,} parameters')
    print(f'{dst}: written')
    for note in notes:
        print(f'note: {note}')
    return 0


def targets(dst: pathlib.Path) -> list[pathlib.Path]:
    """The files that would be written to `dst`."""
    if dst.suffix == '.npz':
        return [dst]
    file = dst if dst.suffix == '.safetensors' else dst / 'model.safetensors'
    return [file, file.with_name('config.json')]


def writer(dst: pathlib.Path) -> Callable[[Any, pathlib.Path], list[str]]:
    """A function (checkpoint, destination) -> notes for people."""
    return write_npz if dst.suffix == '.npz' else write_transformers


def write_npz(foreign: Any, dst: pathlib.Path) -> list[str]:
    """Writes the .npz file that vision_transformer and big_vision, or those who use BiT, read."""
    from vit_jax.interop import bit, files, vision_transformer

    if foreign.family == 'bit_resnet':
        files.write_npz(dst, bit.write_npz(foreign.params, foreign.model))
        return []
    files.write_npz(dst, vision_transformer.write(foreign.params, foreign.model))
    return vision_transformer.losses(foreign.model)


def write_transformers(foreign: Any, dst: pathlib.Path) -> list[str]:
    """Writes safetensors and config.json that `from_pretrained` of transformers reads."""
    from vit_jax.interop import bit, files, huggingface

    if foreign.family == 'bit_resnet':
        written = bit.write_huggingface(foreign.params, foreign.model, foreign.class_names)
    else:
        size, names = foreign.image_size, foreign.class_names
        written = huggingface.write(foreign.params, foreign.model, size, names)
    files.write_safetensors(dst, *written)
    return []
