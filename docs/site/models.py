"""The tables of docs/models.md, made from the package's own lists: part of `make docs`.

Sizes come from `list variants`, released files from `list checkpoints`. `CHECKED` names the
families that read each model's files, its reference implementation, and the test against it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from vit_jax.commands import _catalog
from vit_jax.errors import modules
from vit_jax.interop import families, hub
from vit_jax.profiling import variants

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / 'docs' / 'models.md'
TESTS = 'tests/interop/families'


@dataclasses.dataclass(frozen=True)
class Checked:
    """The reference of a model.

    Attributes:
      oracle: the code or computation that its outputs are compared with.
      test: the file that compares.
      within: the largest difference that the test accepts, as written there.
      families: modules of `vit_jax.interop.families` that read it.
    """

    oracle: str
    test: str
    within: str
    families: tuple[str, ...] = ()


CHECKED = {
    'bit_resnet': Checked(
        "transformers' BiT", 'tests/models/test_bit_resnet.py', '5e-5', ('bit', 'timm_bit')
    ),
    'cappa': Checked("big_vision's CapPa", 'tests/models/test_cappa.py', '1e-5'),
    'clip': Checked(
        "transformers' CLIP",
        f'{TESTS}/test_transformers_clip.py',
        '1e-5',
        ('open_clip', 'transformers_clip'),
    ),
    'colorizer': Checked('counts by hand', 'tests/models/test_colorizer.py', ''),
    'coltran': Checked('sampling against teacher forcing', 'tests/models/test_coltran.py', '1e-5'),
    'coltran_upsampler': Checked(
        'each channel against all at once', 'tests/models/test_coltran_upsampler.py', '1e-5'
    ),
    'detr': Checked(
        "transformers' DETR", 'tests/models/test_detr.py', '1e-5', ('authors_detr', 'detr')
    ),
    'detr_panoptic': Checked(
        "transformers' DETR",
        'tests/models/test_detr_panoptic.py',
        '5e-5',
        ('authors_detr', 'detr'),
    ),
    'dinov2': Checked("ten steps of DINOv3's authors", 'tests/tasks/test_dinov2.py', '1e-5'),
    'dpt': Checked(
        "transformers' Depth Anything and DPT",
        f'{TESTS}/test_transformers_depth.py',
        '1e-5',
        ('transformers_depth', 'transformers_tips_dpt'),
    ),
    'eomt': Checked(
        "transformers' EoMT", 'tests/models/test_eomt.py', '1e-5', ('transformers_eomt',)
    ),
    'hybrid': Checked(
        "timm's hybrids", f'{TESTS}/test_timm_forms.py', '1e-5', ('timm_vit', 'vision_transformer')
    ),
    'inception': Checked(
        'torch-fidelity', 'tests/models/test_inception.py', '1e-5', ('inception',)
    ),
    'jit': Checked("the authors' code", 'tests/models/test_jit.py', '1e-5'),
    'lejepa': Checked('SIGReg in PyTorch', 'tests/tasks/test_lejepa.py', '1e-6'),
    'mae': Checked("transformers' ViTMAE", f'{TESTS}/test_mae.py', '2e-5', ('authors_mae', 'mae')),
    'mixer': Checked("timm's MlpMixer", f'{TESTS}/test_mixer.py', '1e-5', ('mixer',)),
    'naflex': Checked('itself, one image at a time', 'tests/models/test_naflex.py', '1e-6'),
    'open_clip': Checked(
        "timm's and transformers' towers", f'{TESTS}/test_open_clip.py', '1e-5', ('open_clip',)
    ),
    'pmf': Checked("the authors' code", 'tests/tasks/test_meanflow.py', '1e-5'),
    'pmt': Checked("the authors' code", 'tests/models/test_pmt.py', '1e-5', ('authors_pmt',)),
    'projected': Checked('counts by hand', 'tests/tasks/test_distill.py', ''),
    'rf_detr': Checked(
        "transformers' RF-DETR and LW-DETR",
        f'{TESTS}/test_rf_detr.py',
        '1e-5',
        ('rf_detr', 'transformers_lw_detr'),
    ),
    'rnn_seq2seq': Checked('equations in NumPy', 'tests/models/test_rnn_seq2seq.py', '1e-5'),
    'sam_encoder': Checked("transformers' SAM, timm's", f'{TESTS}/test_sam.py', '1e-5', ('sam',)),
    'seq2seq': Checked("transformers' and PyTorch's", 'tests/models/test_seq2seq.py', '1e-5'),
    'siglip': Checked(
        "transformers' SigLIP",
        f'{TESTS}/test_transformers_siglip.py',
        '1e-5',
        ('transformers_siglip',),
    ),
    'siglip2': Checked(
        'SigLIP, CapPa and DINOv2, loss by loss', 'tests/tasks/test_siglip2.py', '1e-6'
    ),
    'siglip_naflex': Checked(
        "transformers' SigLIP 2",
        f'{TESTS}/test_transformers_siglip2.py',
        '1e-5',
        ('transformers_siglip2',),
    ),
    'swin': Checked(
        "transformers' Swin",
        f'{TESTS}/test_transformers_swin.py',
        '1e-5',
        ('timm_swin', 'transformers_swin'),
    ),
    'swin_v2': Checked(
        "transformers' Swin v2",
        f'{TESTS}/test_swin_v2.py',
        '1e-5',
        ('timm_swin', 'transformers_swin'),
    ),
    'swin_v2_cr': Checked("timm's", f'{TESTS}/test_timm_swin_cr.py', '1e-5', ('timm_swin_cr',)),
    'text_encoder': Checked(
        "transformers' CLIP and SigLIP",
        f'{TESTS}/test_transformers_text_tower.py',
        '1e-5',
        ('transformers_text_tower',),
    ),
    'tips': Checked(
        "transformers' TIPSv2",
        f'{TESTS}/test_transformers_tips.py',
        '1e-5',
        ('transformers_tips',),
    ),
    'tips_student': Checked('SigLIP and DINOv2, loss by loss', 'tests/tasks/test_tips.py', '1e-6'),
    'vit': Checked(
        'the code of each [family](checkpoint_families.md#read)',
        f'{TESTS}/test_transformers_forms.py',
        '1e-5',
        (
            'authors_dinov3',
            'authors_dinov2',
            'timm_vit',
            'transformers_beit',
            'transformers_dinov2',
            'transformers_dinov3',
            'transformers_radio',
            'transformers_vision_tower',
            'transformers_vit',
            'transformers_yolos',
            'vision_transformer',
        ),
    ),
    'vit_adaptors': Checked('PyTorch, NumPy', 'tests/tasks/test_agglomerate.py', '1e-6'),
    'vit_factorized': Checked(
        "timm's NaFlexViT", f'{TESTS}/test_timm_forms.py', '1e-5', ('timm_vit',)
    ),
}


def models() -> Iterator[list[str]]:
    """A row for each model."""
    yield ['model', 'description', 'read by', 'written for', 'reference']
    all_families = map(families.find_family, modules(families.__name__))
    writers = [getattr(family, 'WRITERS', {}) for family in all_families]
    for named in _catalog.list_modules(variants.PACKAGE):
        forms = sorted({form for known in writers for name, form in known if name == named.name})
        it = CHECKED[named.name]
        yield [
            f'`{named.name}`',
            named.line.rstrip('.'),
            '<br>'.join(f'`{name}`' for name in it.families),
            ', '.join('.npz' if form == 'npz' else form for form in forms),
            f'{it.oracle}{it.within and f", {it.within}"} ([test](../{it.test}))',
        ]


def sizes() -> Iterator[list[str]]:
    """A row for each size that has a name, or that a released file has."""
    yield ['model', 'size', 'parameters', 'GFLOPs', 'released', 'image sizes', 'best published']
    files: dict[tuple[str, str], list[hub.Released]] = {}
    for one in hub.released_table():
        if named := _named_size(one):
            files.setdefault(named, []).append(one)
    for model, known in variants.read_table().items():
        usual = importlib.import_module(f'{variants.PACKAGE}.{model}')
        same = {repr(usual.variant(v.name)): v.name for v in known}
        found: dict[str, list[hub.Released]] = {v.name: [] for v in known}
        for (name, size), rows in files.items():
            if name == model:
                size = same.get(repr(usual.variant(size)), size)
                found.setdefault(size, []).extend(rows)
        for size, rows in found.items():
            v = next((v for v in known if v.name == size), None)
            at = variants.IMAGE_SIZE if v else min(one.image_size for one in rows)
            yield _size(v or variants.measure(model, size, at), at, rows)


# Names of released ViTs whose layers differ from `variant`'s, so that the list has no model.
NAMED = re.compile(
    r'vit_(?P<a>s)16_i1k|deit_?3_(?P<b>[smblh])|deit[-_](?P<c>[tsb])\w*[-_]distilled|'
    r'(?<!flexi)(?:vit|dinov2(?:-with-registers)?)[-_](?P<d>[sblh])\w*(?:_patch\d+_clip|$)'
)
LETTERS = {'t': 'Ti', 's': 'S', 'm': 'M', 'b': 'B', 'l': 'L', 'h': 'H'}


def _named_size(one: hub.Released) -> tuple[str, str] | None:
    """The model and size of a released file; None if it has no named size."""
    if one.model:
        return one.model['name'], one.model['variant']
    if not (found := NAMED.search(name := one.name.partition('.npz')[0].partition('.')[0])):
        return None
    letter = next(filter(None, found.groups()))
    patch = re.search(r'patch(\d+)', name)
    usual = 14 if 'dinov2' in name or letter == 'h' else 16
    return 'vit', f'{LETTERS[letter]}/{patch[1] if patch else usual}'


def _size(size: variants.Variant, at: int, files: list[hub.Released]) -> list[str]:
    pixels = sorted({str(one.image_size) for one in files if one.image_size})
    other = '' if at == variants.IMAGE_SIZE else f' at {at}'
    return [
        f'`{size.model}`',
        size.name,
        _millions(size.parameters),
        f'{2 * size.gmacs:,.4g}{other}',
        str(len(files) or ''),
        ', '.join(pixels),
        _best(files),
    ]


def _best(files: Iterable[hub.Released]) -> str:
    """The best accuracy, with its source and metric."""
    known = [one for one in files if one.accuracy is not None]
    if not known:
        return ''
    best = max(known, key=lambda one: one.accuracy)
    return f'[{best.accuracy:.1f}]({best.source}) {best.metric}'


def sources() -> Iterator[list[str]]:
    """A row for each page that describes released files."""
    yield ['source', 'files', 'parameters', 'image sizes', 'trained on', 'best published']
    groups: dict[str, list[hub.Released]] = {}
    for one in hub.released_table():
        groups.setdefault(one.source, []).append(one)
    for source, files in groups.items():
        counts = [one.parameters for one in files if one.parameters]
        pixels = [one.image_size for one in files if one.image_size]
        data = sorted({one.trained_on.split(',')[0] for one in files})
        yield [
            f'[{_title(source)}]({source})',
            str(len(files)),
            _range(map(_millions, sorted(counts))),
            _range(map(str, sorted(pixels))),
            ', '.join(data[:3]) + (', ...' if len(data) > 3 else ''),
            _best(files),
        ]


def _title(source: str) -> str:
    """`owner/name` of a repository, and the folder or file in it."""
    parts = [part for part in urlsplit(source).path.split('/') if part]
    return '/'.join(parts[:2]) + (f', {Path(parts[-1]).stem}' if len(parts) > 2 else '')


def _millions(count: int) -> str:
    return f'{count / 1e6:,.3g} M' if count < 1e9 else f'{count / 1e6:,.0f} M'


def _range(values: Iterable[str]) -> str:
    found = list(dict.fromkeys(values))
    return ' to '.join(found[:1] + found[-1:] if len(found) > 1 else found)


TABLES = {'models': models, 'sizes': sizes, 'sources': sources}


def written(text: str, name: str) -> str:
    """The page's text with one of its tables made anew."""
    head, *body = TABLES[name]()
    table = ''.join(f'| {" | ".join(row)} |\n' for row in (head, ['---'] * len(head), *body))
    between = re.compile(rf'(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)', re.DOTALL)
    return between.sub(lambda _: table, text)


if __name__ == '__main__':
    PAGE.write_text(functools.reduce(written, TABLES, PAGE.read_text()))
