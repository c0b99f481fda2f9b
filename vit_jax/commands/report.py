"""Write a report on runs as a single HTML file to send to a colleague."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.commands import compare, goodput
from vit_jax.commands._parser import RUNS_HELP, Parser, add_allow_flag, check_output, writing
from vit_jax.errors import UserError, visible
from vit_jax.profiling.cost import train_flops
from vit_jax.scaling import runs
from vit_jax.scaling.pages import (
    Block,
    Folded,
    Heading,
    Lines,
    Picture,
    TableBlock,
    Text,
    html_page,
)
from vit_jax.storage import paths, run_folder, times
from vit_jax.viz import comparison, curves, figures
from vit_jax.viz.charts import draw_goodput
from vit_jax.viz.comparison import History

PICTURES = ('.png', '.jpg', '.jpeg', '.webp', '.gif')
MAX_BYTES = 2**21  # of an embedded picture
MAX_PICTURES = 12  # embedded per run
MAX_METRICS = 16  # drawn for several runs

Files = dict[str, bytes]


def main(argv: Sequence[str]) -> int:
    """Write the page, and print its name and size.

    Raises:
      UserError: if the name of the page does not end in .html.
    """
    parser = Parser('report', __doc__)
    parser.add_argument(
        'runs',
        nargs='+',
        metavar='RUN',
        help=RUNS_HELP,
    )
    parser.add_argument(
        '--out',
        metavar='FILE',
        default='report.html',
        help='self-contained page to write, with curves, evaluations, pictures, cost, configs and '
        'digests (default: %(default)s)',
    )
    add_allow_flag(parser)
    args = parser.parse_args(argv)
    out = paths.path(args.out)
    if out.suffix.lower() not in ('.html', '.htm'):
        raise UserError(f'--out {args.out!r}: the name must end in .html')
    check_output(out, '--out')
    found = read(args.runs, args.allow)
    text = visible(html_page(*blocks(found)))
    with writing(args.out, '--out'):
        paths.write_text_atomic(out, text)
    print(f'{args.out}: {len(found)} run{"s" * (len(found) > 1)}, {len(text) / 1024:,.0f} KiB')
    return 0


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the page.

    Attributes:
      name: unique on the page.
      folder: Run folder.
      row: Row of `scaling.runs.read_run`.
      differs: its config values that differ between the runs of the page.
      history: its metrics; empty before it has logged any.
      note: why its FLOPs are unknown; empty if they are known.
    """

    name: str
    folder: paths.Path
    row: dict[str, runs.Cell]
    differs: dict[str, runs.Cell]
    history: History
    note: str = ''


def read(folders: Sequence[str], allowed: Sequence[str] = ()) -> list[Run]:
    """Read the runs in these folders, at any depth, each once.

    Args:
      folders: run folders, or folders of them.
      allowed: modules that a stored config may name.

    Raises:
      UserError: if a folder holds no run, or a run's config or metadata is damaged.
    """
    found = [run for folder in folders for run in run_folder.find(paths.path(folder))]
    different = list({paths.absolute(run): run for run in found}.values())
    labels = comparison.labels([str(run) for run in different])
    together = zip(labels, different, runs.config_differences(different), strict=True)
    return [_read(name, run, differs, allowed) for name, run, differs in together]


def _read(
    name: str, folder: paths.Path, differs: dict[str, runs.Cell], allowed: Sequence[str]
) -> Run:
    notes: list[str] = []

    def flops_of(meta: dict[str, Any]) -> float | None:
        try:
            return train_flops(meta, allowed)
        except UserError as error:
            notes.append(str(error))
            return None

    try:
        row = runs.read_run(folder, flops_of)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f'{folder}: the newest checkpoint has damaged metadata ({error!r}); see inspect '
            f'--verify {folder}'
        ) from error
    history = History(name, run_folder.read_series(folder))
    return Run(name, folder, row, differs, history, ''.join(notes))


def blocks(found: Sequence[Run]) -> tuple[list[Block], Files]:
    """Return the blocks of the page, and its pictures by name."""
    drawn, files = _drawings(found)
    shown, images = _pictures(found)
    spent, timeline = _time(found)
    title = found[0].name if len(found) == 1 else f'{len(found)} runs: {_name_list(found)}'
    page: list[Block] = [
        Heading(title, 1),
        Lines([f'{run.name}: {_progress(run)}' for run in found]),
        *_section('Evaluations', _evaluations(found)),
        *_section('Curves', drawn),
        *_section('Pictures', shown),
        *_section('Cost', _cost(found)),
        *_section('Time', spent),
        *_section('Config', _configs(found)),
        *_section('Environment', _environment(found)),
        *_section('Checkpoints', _checkpoints(found)),
    ]
    return page, files | images | timeline


def _name_list(found: Sequence[Run]) -> str:
    first = ', '.join(run.name for run in found[:4])
    return first + ', ...' * (len(found) > 4)


def _section(title: str, content: Sequence[Block]) -> list[Block]:
    return [Heading(title), *content] if content else []


def _progress(run: Run) -> str:
    steps = f'{run.row["steps"]:,} steps'
    if not run.row['finished']:
        return f'unfinished, {steps} so far'
    ending = run_folder.read_ending(run.folder)
    return f'ended early after {steps}: {ending}' if ending else f'finished after {steps}'


def _evaluation_metrics(found: Sequence[Run]) -> list[str]:
    """The evaluation metrics of all runs together."""
    every = dict.fromkeys(name for run in found for name in run.history.series)
    return [name for name in every if not name.startswith('train/')]


def _evaluations(found: Sequence[Run]) -> list[Block]:
    metrics = _evaluation_metrics(found)
    if not metrics:
        return [Text('Nothing has been evaluated yet.')]
    if len(found) == 1:
        head = ['metric', 'last', 'best', 'at step']
        return [TableBlock([head, *(_result(found[0].history, metric) for metric in metrics)])]
    rows = [[m, *(compare.format_value(m, run.history.last(m)) for run in found)] for m in metrics]
    return [
        Text('The last value of each metric.'),
        TableBlock([_heading_row('metric', found), *rows]),
    ]


def _result(history: History, metric: str) -> list[str]:
    """The last and the best value of a metric, and the step of the best."""
    steps, values = history.series[metric]
    falls = comparison.smaller_is_better([history], metric)
    best = int(np.nan_to_num(values if falls else -values, nan=np.inf).argmin())
    shown = [compare.format_value(metric, float(value)) for value in (values[-1], values[best])]
    return [metric, *shown, f'{steps[best]:,}']


def _heading_row(corner: str, found: Sequence[Run]) -> list[str]:
    return [corner, *(run.name for run in found)]


def _drawings(found: Sequence[Run]) -> tuple[list[Block], Files]:
    """Draw the curves: of one run a panel per kind of metric, of several a panel per metric."""
    histories = [run.history for run in found if run.history.series]
    shown: list[Block] = []
    files: Files = {}
    for i, (words, figure) in enumerate(_figures(found, histories)):
        name = f'curve_{i}.svg'
        files[name] = figures.svg(figure)
        shown.append(Picture(name, words))
    words = 'Click a drawing to enlarge it.' if shown else 'There is nothing to draw yet.'
    return [Text(words), *shown], files


def _figures(found: Sequence[Run], histories: Sequence[History]) -> list[tuple[str, Any]]:
    """Alternative texts and figures."""
    if len(found) == 1:
        series = found[0].history.series
        remarks = curves.remarks(run_folder.read_config(found[0].folder) or {}, series)
        return [
            (_alternative_text(histories, group), curves.draw(series, {key: group}, '', remarks))
            for key, group in curves.panels(series).items()
        ]
    every = dict.fromkeys(['train/loss', *_evaluation_metrics(found)])
    drawn = [name for name in every if any(name in history.series for history in histories)]
    return [
        (_alternative_text(histories, [name]), comparison.draw(histories, [name]))
        for name in drawn[:MAX_METRICS]
    ]


def _alternative_text(histories: Sequence[History], metrics: Sequence[str]) -> str:
    """The last values of the metrics, for readers who cannot see the drawing."""
    ends = [
        f'{figures.title(metric)}{f" of {h.name}" if len(histories) > 1 else ""} '
        f'ends at {compare.format_value(metric, h.last(metric))}'
        for metric in metrics
        for h in histories
        if metric in h.series
    ]
    return 'Curves over steps: ' + ', '.join(ends)


def _pictures(found: Sequence[Run]) -> tuple[list[Block], Files]:
    """The pictures in the run folders, except the curves; large ones are only named.

    Links are left out, as they may lead to private files.
    """
    shown: list[Block] = []
    files: Files = {}
    for i, run in enumerate(found):
        images = [p for p in run.folder.iterdir() if p.suffix.lower() in PICTURES]
        own = [p for p in images if p.name != run_folder.CURVES and not p.is_symlink()]
        kept = sorted(p for p in own if p.is_file())
        small = [p for p in kept if p.stat().st_size <= MAX_BYTES][:MAX_PICTURES]
        for path in small:
            name = f'{i}/{path.name}'
            files[name] = paths.read_bytes(path)
            shown += [Text(f'{run.name}: {path.name}'), Picture(name, f'{path.name} of {run.name}')]
        if left := [p.name for p in kept if p not in small]:
            shown.append(Text(f'{run.name} has more, not shown here: {", ".join(left)}'))
    return shown, files


def _cost(found: Sequence[Run]) -> list[Block]:
    rows = [_spent(run) for run in found]
    keys = dict.fromkeys(key for row in rows for key in row)
    table = [[key, *(row.get(key, '-') for row in rows)] for key in keys]
    notes = [f'{run.name}: FLOPs are unknown: {run.note}' for run in found if run.note]
    words = (
        'FLOPs include the forward and backward pass of all training steps. Minutes and chip-hours '
        'exclude evaluations and saving.'
    )
    shown: list[Block] = [TableBlock([_heading_row('', found), *table]), Text(words)]
    return [*shown, Lines(notes)] if notes else shown


def _spent(run: Run) -> dict[str, str]:
    """The cost of a run as in `compare`, with examples, FLOPs and chip-hours."""
    row: dict[str, Any] = {key: run.row.get(key) for key in ('parameters', 'steps')}
    if 'train/step_sec' in run.history.series:
        row |= compare.row(str(run.folder), run.history, ())
        del row['run']
    row['examples'] = run.row.get('examples_seen')
    row['chip-hours'] = run.row.get('chip_hours')
    shown = {key: compare.format_value(key, value) for key, value in row.items()}
    flops = run.row.get('flops')
    return shown | {'FLOPs': '-' if flops is None else f'{flops:.3g}'}


def _time(found: Sequence[Run]) -> tuple[list[Block], Files]:
    """The parts of the runs' time as a table and a drawing; empty without a record of times."""
    read = {run.name: times.read(run.folder) for run in found}
    accounts = {name: account for name, account in read.items() if account is not None}
    if not accounts:
        return [], {}
    words = ', '.join(f'{name}: {a.goodput:.1%} steps' for name, a in accounts.items())
    drawing = Picture('time.svg', f'Shares of time, over time: {words}')
    files = {drawing.name: figures.svg(draw_goodput(accounts))}
    return [TableBlock(goodput.table(accounts)), drawing], files


def _configs(found: Sequence[Run]) -> list[Block]:
    """The config values that differ, then each whole config, folded."""
    rows = [[key, *(_value(run.differs[key]) for run in found)] for key in found[0].differs]
    shown: list[Block] = []
    if rows:
        words = 'The values that differ; where a value is missing, the default applies.'
        shown = [Text(words), TableBlock([_heading_row('', found), *rows])]
    elif len(found) > 1:
        shown = [Text('The runs have the same config.')]
    for run in found:
        text = json.dumps(run_folder.read_config(run.folder), indent=2, ensure_ascii=False)
        shown.append(Folded(f'Config of {run.name}', text))
    return shown


def _value(value: runs.Cell) -> str:
    return '-' if value is None else str(value)


def _environment(found: Sequence[Run]) -> list[Block]:
    saved = [run_folder.newest(run.folder) for run in found]
    metas = [run_folder.read_meta(step) if step else {} for step in saved]
    rows = [_surroundings(run, meta) for run, meta in zip(found, metas, strict=True)]
    keys = dict.fromkeys(key for row in rows for key in row)
    table = [[key, *(row.get(key, '-') for row in rows)] for key in keys]
    shown: list[Block] = [TableBlock([_heading_row('', found), *table])]
    for run, meta in zip(found, metas, strict=True):
        if isinstance(classes := meta.get('class_names'), list):
            shown.append(Folded(f'Classes of {run.name}', '\n'.join(map(str, classes))))
    return shown


def _surroundings(run: Run, meta: dict[str, Any]) -> dict[str, str]:
    """Devices, data and versions of the newest step."""
    versions = meta.get('versions', {})
    return {
        'hardware': str(run.row['hardware'] or '-'),
        'training examples': _data_size(run),
        **{str(name): str(version) for name, version in versions.items()},
    }


def _data_size(run: Run) -> str:
    size = run.row.get('data_size')
    return f'{size:,}' if isinstance(size, int) else '-'


def _checkpoints(found: Sequence[Run]) -> list[Block]:
    """The digest of every finished step: the hash of its manifest, which lists all hashes."""
    rows = []
    for run in found:
        config = runs.digest(run_folder.read_config(run.folder) or {})
        saved = [
            _digest(run.folder / run_folder.CHECKPOINTS / str(s))
            for s in run_folder.steps(run.folder)
        ]
        rows += [[run.name, config, *cells] for cells in saved or [('-', '-', 'nothing saved')]]
    words = (
        'The last column is the SHA-256 of `checkpoints/STEP/manifest.json`, which lists the '
        'hashes of all files of the step; `inspect --verify` compares the files with them.'
    )
    head = ['run', 'config', 'step', 'files', 'SHA-256']
    return [TableBlock([head, *rows]), Text(words)]


def _digest(step: paths.Path) -> tuple[str, str, str]:
    content = paths.read_bytes(step / run_folder.MANIFEST)
    files = len(run_folder.read_manifest(step))
    return step.name, str(files), hashlib.sha256(content).hexdigest()
