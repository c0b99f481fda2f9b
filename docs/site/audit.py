"""The audit of docs/moving_configs.md: what configs of big_vision and vision_transformer need here.

    python docs/site/audit.py BIG_VISION VISION_TRANSFORMER

The arguments are checkouts of google-research/big_vision and google-research/vision_transformer.
Every config there has to match exactly one row of ROWS, so that new configs are noticed, and every
row has to match a config and to name files that exist here. The models are read from the configs.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / 'docs' / 'moving_configs.md'
TITLE = '# Every config of big_vision and vision_transformer'
FOLDERS = {'BV': 'big_vision/configs', 'VT': 'vit_jax/configs'}
# Files that define parts of configs, but no run.
PARTS = ('*__init__.py', '*common.py', 'BV/common_fewshot.py', 'VT/models.py', '*/forkme.py')
RUNS, DIFFERS, MISSING = 'runs', 'differs', 'missing'


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      pattern: of configs, such as `BV/proj/distill/bigsweep_*.py`.
      verdict: RUNS, DIFFERS or MISSING.
      here: the counterpart, beginning with a file below experiments/; empty if there is none.
      text: what differs, or what is missing.
    """

    pattern: str
    verdict: str
    here: str
    text: str


_GRAY = 'pixels are rounded to gray levels after resizing'
_DISTILL = "`config.task.name='distill'`"
ROWS = (
    Row('BV/vit_s16_i1k.py', RUNS, 'vit/imagenet2012.py', ''),
    Row('BV/vit_i1k.py', RUNS, 'vit/augreg.py', ''),
    Row('BV/vit_i21k.py', DIFFERS, 'vit/augreg_i21k.py', 'other images are held out'),
    Row('BV/mlp_mixer_i1k.py', DIFFERS, 'mixer/imagenet2012.py', 'how dropped branches are scaled'),
    Row('BV/bit_i1k.py', DIFFERS, 'bit/imagenet2012.py', 'schedule of the paper'),
    Row('BV/bit_i21k.py', DIFFERS, 'bit/imagenet2012.py', 'no recipe for the data of ImageNet-21k'),
    Row('BV/transfer.py', RUNS, 'vit/transfer.py:pets,variant=B/32', ''),
    Row('BV/load_and_eval.py', DIFFERS, '', '`evaluate --checkpoint` for ViT, Mixer and BiT'),
    Row('BV/proj/gsam/*.py', DIFFERS, 'vit/imagenet2012.py',
        '`config.step.sam`; one perturbation for the global batch, one for each device there'),
    Row('BV/proj/distill/*.py', DIFFERS, 'distill/cifar10.py',
        f'{_DISTILL} with a BiT as `teacher`; no recipe for these data'),
    Row('BV/proj/flexivit/i21k_sup.py', DIFFERS, 'vit/flexivit.py:B/16',
        'ImageNet-1k, no mixup'),
    Row('BV/proj/flexivit/*distill.py', DIFFERS, 'vit/flexivit.py:B/16',
        f'labels instead of a teacher; {_DISTILL} was not tried with it'),
    Row('BV/proj/flexivit/timing.py', DIFFERS, 'vit/flexivit.py:B/16', '`benchmark`'),
    Row('BV/proj/image_text/siglip_lit_coco.py', DIFFERS, 'siglip/own.py:lit',
        'your own data, vocabulary and text tower'),
    Row('BV/proj/cappa/pretrain.py', DIFFERS, 'cappa/scenes.py',
        'the same model and loss; small, on drawn images, by AdamW'),
    Row('BV/proj/scaling_laws/train_vit_g.py', DIFFERS, 'scaling/zhai.py',
        'ImageNet-21k instead of JFT-3B, which is not public'),
    Row('BV/proj/clippo/*.py', MISSING, '', 'texts drawn as images'),
    Row('BV/proj/givt/*.py', MISSING, '',
        'tokens of a variational autoencoder, and mixtures of normal distributions for them'),
    Row('BV/proj/jet/*.py', MISSING, '', 'normalizing flows'),
    Row('BV/proj/jetformer/*.py', MISSING, '', 'normalizing flows, and a decoder of their tokens'),
    Row('BV/proj/paligemma/transfers/*.py', MISSING, '',
        'Gemma, a decoder of text after an image; its image encoders load (`siglip`)'),
    Row('BV/proj/reward_tune/*.py', MISSING, '',
        'rewards as losses; detection by sequences of tokens'),
    Row('BV/proj/uvim/*.py', MISSING, '', 'a VQ-VAE of labels, and a language model of its codes'),
    Row('VT/vit.py', DIFFERS, 'vit/finetune.py:cifar10,variant=B/16', _GRAY),
    Row('VT/augreg.py', DIFFERS, 'vit/own.py', f'batch and steps by flags; {_GRAY}'),
    Row('VT/mixer_base16_cifar10.py', DIFFERS, 'vit/own.py',
        f'batch and steps by flags; {_GRAY}'),
    Row('VT/inference_time.py', DIFFERS, 'vit/finetune.py:imagenet2012,variant=B/32',
        '`benchmark --forward-only`'),
)  # fmt: skip
VERDICTS = {
    RUNS: 'the same recipe',
    DIFFERS: 'differs:',
    MISSING: 'missing:',
}


def configs(root: Path, kind: str) -> dict[str, str]:
    """The configs of a checkout and their texts, by names such as `BV/vit_i1k.py`."""
    folder = root / FOLDERS[kind]
    found = {f'{kind}/{p.relative_to(folder)}': p.read_text() for p in folder.rglob('*.py')}
    if not found:
        raise SystemExit(f'error: {folder} holds no configs')
    return {
        name: text
        for name, text in sorted(found.items())
        if not any(fnmatch.fnmatchcase(name, part) for part in PARTS)
    }


def models(text: str) -> set[str]:
    """The models that a config names."""
    return set(re.findall(r"model_name\s*=\s*'([^']+)'", text))


def subject(text: str) -> str:
    """The first line of a config's docstring."""
    return (ast.get_docstring(ast.parse(text)) or '').partition('\n')[0]


def check(found: dict[str, str]) -> None:
    """Exit with a line for each config without a row, or with two, and each stale row."""
    faults = []
    for name in found:
        rows = [row.pattern for row in ROWS if fnmatch.fnmatchcase(name, row.pattern)]
        if len(rows) != 1:
            faults.append(f'{name}: {subject(found[name])!r} matches {rows or "no row of ROWS"}')
    for row in ROWS:
        if not fnmatch.filter(found, row.pattern):
            faults.append(f'{row.pattern}: matches no config')
        file = row.here.partition(':')[0]
        if file and not (ROOT / 'experiments' / file).is_file():
            faults.append(f'{row.pattern}: there is no experiments/{file}')
    if faults:
        raise SystemExit('\n'.join(f'error: {fault}' for fault in faults))


def table(found: dict[str, str]) -> Iterator[str]:
    """The lines of the table."""
    yield '| config | models | here | |'
    yield '|---|---|---|---|'
    for row in ROWS:
        names = fnmatch.filter(found, row.pattern)
        folder = names[0].rpartition('/')[0]
        listed = ', '.join(Path(name).stem for name in names)
        shown = f'{folder}: {listed}' if len(names) > 1 else names[0]
        used = ', '.join(sorted(set().union(*(models(found[name]) for name in names))))
        here = f'`{row.here}`' if row.here else ''
        verdict = f'{VERDICTS[row.verdict]} {row.text}'.rstrip()
        yield f'| {shown} | {used} | {here} | {verdict} |'


def revision(root: Path) -> str:
    """The commit of a checkout; empty for another folder."""
    words = ['git', '-C', str(root), 'log', '-1', '--format=%h of %ad', '--date=short']
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(words: Sequence[str]) -> None:
    """Write the section of docs/moving.md."""
    if len(words) != 2:
        raise SystemExit('error: give checkouts of big_vision and of vision_transformer')
    roots = dict(zip(FOLDERS, map(Path, words), strict=True))
    found: dict[str, str] = {}
    for kind, root in roots.items():
        found |= configs(root, kind)
    check(found)
    counts = dict.fromkeys(VERDICTS, 0)
    for row in ROWS:
        counts[row.verdict] += len(fnmatch.filter(found, row.pattern))
    gemma = len(fnmatch.filter(found, 'BV/proj/paligemma/*'))
    told = ', '.join(f'{kind} {at}' for kind, root in roots.items() if (at := revision(root)))
    lines = (
        TITLE,
        '',
        f'Of {len(found)} configs, {counts[RUNS]} have the same recipe here, {counts[DIFFERS]} one '
        f'that differs, and {counts[MISSING]} need what is missing here,',
        f"{gemma} of them PaliGemma's. BV is big_vision, VT vision_transformer;",
        f'`docs/site/audit.py` makes the table{f" ({told})" if told else ""}.',
        '',
        *table(found),
        '',
    )
    text = '\n'.join(lines)
    page = PAGE.read_text()
    start = page.index(TITLE)
    end = page.find('\n## ', start)
    PAGE.write_text(page[:start] + text + (page[end:] if end >= 0 else ''))


if __name__ == '__main__':
    main(sys.argv[1:])
