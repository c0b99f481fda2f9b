"""Blocks of the page of `report`: curves, evaluations, pictures, cost, configs and digests."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.commands import compare, goodput
from vit_jax.errors import UserError
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
)
from vit_jax.storage import paths, run_folder, times
from vit_jax.viz import comparison, curves, figures
from vit_jax.viz.charts import draw_goodput
from vit_jax.viz.comparison import History

PICTURES = ('.png', '.jpg', '.jpeg', '.webp', '.gif')
MAX_BYTES = 2**21  # largest size of an embedded picture
MAX_PICTURES = 12  # most pictures embedded per run
MAX_METRICS = 16  # most drawings of metrics

Files = dict[str, bytes]


@dataclasses.dataclass(frozen=True)
class ReportedRun:
    """Run of the page.

    Attributes:
      name: Name, unique on the page.
      folder: Run folder.
      row: Row of `scaling.runs.read_run`.
      differs: Config values that differ between the runs of the page.
      history: Logged metrics, possibly empty.
      note: Reason why its FLOPs are unknown; empty if they are known.
    """

    name: str
    folder: paths.Path
    row: dict[str, runs.Cell]
    differs: dict[str, runs.Cell]
    history: History
    note: str = ''


def read(folders: Sequence[str], allowed: Sequence[str] = ()) -> list[ReportedRun]:
    """Read the runs in these folders, at any depth, each once.

    Args:
      folders: Run folders, or folders of them.
      allowed: Modules that a stored config may name.

    Raises:
      UserError: A folder does not contain a run, or a run's config or metadata is damaged.
    """
    all_runs = [run for folder in folders for run in run_folder.find_runs(paths.path(folder))]
    different = list({paths.absolute(run): run for run in all_runs}.values())
    labels = comparison.labels([str(run) for run in different])
    together = zip(labels, different, runs.config_differences(different), strict=True)
    return [_read(name, run, differs, allowed) for name, run, differs in together]


def _read(
    name: str, folder: paths.Path, differs: dict[str, runs.Cell], allowed: Sequence[str]
) -> ReportedRun:
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
    return ReportedRun(name, folder, row, differs, history, ''.join(notes))


def blocks(entries: Sequence[ReportedRun]) -> tuple[list[Block], Files]:
    """Return the blocks of the page, and its pictures by name."""
    curve_blocks, files = _draw_curves(entries)
    picture_blocks, images = _collect_pictures(entries)
    time_blocks, timeline = _tabulate_time(entries)
    title = entries[0].name if len(entries) == 1 else f'{len(entries)} runs: {_join_names(entries)}'
    page: list[Block] = [
        Heading(title, 1),
        Lines([f'{run.name}: {_describe_progress(run)}' for run in entries]),
        *_make_section('Evaluations', _tabulate_evaluations(entries)),
        *_make_section('Curves', curve_blocks),
        *_make_section('Pictures', picture_blocks),
        *_make_section('Cost', _tabulate_cost(entries)),
        *_make_section('Time', time_blocks),
        *_make_section('Config', _show_configs(entries)),
        *_make_section('Environment', _tabulate_environment(entries)),
        *_make_section('Checkpoints', _tabulate_checkpoints(entries)),
    ]
    return page, files | images | timeline


def _join_names(entries: Sequence[ReportedRun]) -> str:
    names = ', '.join(run.name for run in entries[:4])
    return names + ', ...' * (len(entries) > 4)


def _make_section(title: str, content: Sequence[Block]) -> list[Block]:
    return [Heading(title), *content] if content else []


def _describe_progress(run: ReportedRun) -> str:
    steps = f'{run.row["steps"]:,} steps'
    if not run.row['finished']:
        return f'unfinished, {steps} so far'
    ending = run_folder.read_ending(run.folder)
    return f'ended early after {steps}: {ending}' if ending else f'finished after {steps}'


def _evaluation_metrics(entries: Sequence[ReportedRun]) -> list[str]:
    """List the evaluation metrics of all runs."""
    names = dict.fromkeys(name for run in entries for name in run.history.series)
    return [name for name in names if not name.startswith('train/')]


def _tabulate_evaluations(entries: Sequence[ReportedRun]) -> list[Block]:
    metrics = _evaluation_metrics(entries)
    if not metrics:
        return [Text('Nothing has been evaluated yet.')]
    if len(entries) == 1:
        head = ['metric', 'last', 'best', 'at step']
        return [
            TableBlock(
                [head, *(_summarize_metric(entries[0].history, metric) for metric in metrics)]
            )
        ]
    rows = [
        [m, *(compare.format_value(m, run.history.last(m)) for run in entries)] for m in metrics
    ]
    return [
        Text('The last value of each metric.'),
        TableBlock([_heading_row('metric', entries), *rows]),
    ]


def _summarize_metric(history: History, metric: str) -> list[str]:
    """Find the last and the best value of a metric, and the step of the best."""
    steps, values = history.series[metric]
    falls = comparison.smaller_is_better([history], metric)
    best = int(np.nan_to_num(values if falls else -values, nan=np.inf).argmin())
    formatted = [compare.format_value(metric, float(value)) for value in (values[-1], values[best])]
    return [metric, *formatted, f'{steps[best]:,}']


def _heading_row(corner: str, entries: Sequence[ReportedRun]) -> list[str]:
    return [corner, *(run.name for run in entries)]


def _draw_curves(entries: Sequence[ReportedRun]) -> tuple[list[Block], Files]:
    """Draw curves: a panel per kind of metric for one run, a panel per metric for several."""
    histories = [run.history for run in entries if run.history.series]
    pictures: list[Block] = []
    files: Files = {}
    panels = _panels(entries)
    for i, metrics in enumerate(panels[:MAX_METRICS]):
        name = f'curve_{i}.svg'
        files[name] = figures.svg(_figure(entries, histories, metrics))
        pictures.append(Picture(name, _describe_curves(histories, metrics)))
    note = 'Click a drawing to enlarge it.' if pictures else 'There is nothing to draw yet.'
    if len(panels) > MAX_METRICS:
        note += f' {len(panels) - MAX_METRICS} more metrics are only in the table.'
    return [Text(note), *pictures], files


def _panels(entries: Sequence[ReportedRun]) -> list[list[str]]:
    """List the metrics of each drawing."""
    if len(entries) == 1:
        return list(curves.panels(entries[0].history.series).values())
    names = dict.fromkeys(['train/loss', *_evaluation_metrics(entries)])
    return [[name] for name in names if any(name in run.history.series for run in entries)]


def _figure(
    entries: Sequence[ReportedRun], histories: Sequence[History], metrics: Sequence[str]
) -> Any:
    if len(entries) > 1:
        return comparison.draw(histories, metrics)
    series = entries[0].history.series
    remarks = curves.remarks(run_folder.read_config(entries[0].folder) or {}, series)
    return curves.draw(series, {metrics[0].rpartition('/')[2]: list(metrics)}, '', remarks)


def _describe_curves(histories: Sequence[History], metrics: Sequence[str]) -> str:
    """Describe the last values of the metrics, for readers who cannot see the drawing."""
    ends = [
        f'{figures.title(metric)}{f" of {h.name}" if len(histories) > 1 else ""} '
        f'ends at {compare.format_value(metric, h.last(metric))}'
        for metric in metrics
        for h in histories
        if metric in h.series
    ]
    return 'Curves over steps: ' + ', '.join(ends)


def _collect_pictures(entries: Sequence[ReportedRun]) -> tuple[list[Block], Files]:
    """Collect the pictures in the run folders, except the curves; large ones are only named.

    Links are left out because they may lead to private files.
    """
    page: list[Block] = []
    files: Files = {}
    for i, run in enumerate(entries):
        images = [p for p in run.folder.iterdir() if p.suffix.lower() in PICTURES]
        unlinked = [p for p in images if p.name != run_folder.CURVES and not p.is_symlink()]
        candidates = sorted(p for p in unlinked if p.is_file())
        small = [p for p in candidates if p.stat().st_size <= MAX_BYTES][:MAX_PICTURES]
        for path in small:
            name = f'{i}/{path.name}'
            files[name] = paths.read_bytes(path)
            page += [Text(f'{run.name}: {path.name}'), Picture(name, f'{path.name} of {run.name}')]
        if omitted := [p.name for p in candidates if p not in small]:
            page.append(Text(f'{run.name} has more, not shown here: {", ".join(omitted)}'))
    return page, files


def _tabulate_cost(entries: Sequence[ReportedRun]) -> list[Block]:
    rows = [_cost_of(run) for run in entries]
    keys = dict.fromkeys(key for row in rows for key in row)
    table = [[key, *(row.get(key, '-') for row in rows)] for key in keys]
    notes = [f'{run.name}: FLOPs are unknown: {run.note}' for run in entries if run.note]
    explanation = (
        'FLOPs include the forward and backward pass of all training steps. Minutes and chip-hours '
        'exclude evaluations and saving.'
    )
    page: list[Block] = [TableBlock([_heading_row('', entries), *table]), Text(explanation)]
    return [*page, Lines(notes)] if notes else page


def _cost_of(run: ReportedRun) -> dict[str, str]:
    """Collect the cost of a run, see `compare`, with examples, FLOPs and chip-hours."""
    row: dict[str, Any] = {key: run.row.get(key) for key in ('parameters', 'steps')}
    if 'train/step_sec' in run.history.series:
        row |= compare.row(str(run.folder), run.history, ())
        del row['run']
    row['examples'] = run.row.get('examples_seen')
    row['chip-hours'] = run.row.get('chip_hours')
    formatted = {key: compare.format_value(key, value) for key, value in row.items()}
    flops = run.row.get('flops')
    return formatted | {'FLOPs': '-' if flops is None else f'{flops:.3g}'}


def _tabulate_time(entries: Sequence[ReportedRun]) -> tuple[list[Block], Files]:
    """Tabulate and draw the parts of the runs' time; empty without a record of times."""
    records = {run.name: times.read(run.folder) for run in entries}
    accounts = {name: account for name, account in records.items() if account is not None}
    if not accounts:
        return [], {}
    shares = ', '.join(f'{name}: {a.goodput:.1%} steps' for name, a in accounts.items())
    drawing = Picture('time.svg', f'Shares of time, over time: {shares}')
    files = {drawing.name: figures.svg(draw_goodput(accounts))}
    return [TableBlock(goodput.make_table(accounts)), drawing], files


def _show_configs(entries: Sequence[ReportedRun]) -> list[Block]:
    """Show the config values that differ, then each complete config, folded."""
    rows = [
        [key, *(_format_value(run.differs[key]) for run in entries)] for key in entries[0].differs
    ]
    page: list[Block] = []
    if rows:
        explanation = 'The values that differ; where a value is missing, the default applies.'
        page = [Text(explanation), TableBlock([_heading_row('', entries), *rows])]
    elif len(entries) > 1:
        page = [Text('The runs have the same config.')]
    for run in entries:
        text = json.dumps(run_folder.read_config(run.folder), indent=2, ensure_ascii=False)
        page.append(Folded(f'Config of {run.name}', text))
    return page


def _format_value(value: runs.Cell) -> str:
    return '-' if value is None else str(value)


def _tabulate_environment(entries: Sequence[ReportedRun]) -> list[Block]:
    saved = [run_folder.newest(run.folder) for run in entries]
    metas = [run_folder.read_meta(step) if step else {} for step in saved]
    rows = [_environment_of(run, meta) for run, meta in zip(entries, metas, strict=True)]
    keys = dict.fromkeys(key for row in rows for key in row)
    table = [[key, *(row.get(key, '-') for row in rows)] for key in keys]
    page: list[Block] = [TableBlock([_heading_row('', entries), *table])]
    for run, meta in zip(entries, metas, strict=True):
        if isinstance(classes := meta.get('class_names'), list):
            page.append(Folded(f'Classes of {run.name}', '\n'.join(map(str, classes))))
    return page


def _environment_of(run: ReportedRun, meta: dict[str, Any]) -> dict[str, str]:
    """Collect the devices, data and versions of the newest step."""
    versions = meta.get('versions', {})
    return {
        'hardware': str(run.row['hardware'] or '-'),
        'training examples': _format_data_size(run),
        **{str(name): str(version) for name, version in versions.items()},
    }


def _format_data_size(run: ReportedRun) -> str:
    size = run.row.get('data_size')
    return f'{size:,}' if isinstance(size, int) else '-'


def _tabulate_checkpoints(entries: Sequence[ReportedRun]) -> list[Block]:
    """Tabulate the digest of every finished step: the hash of its manifest of hashes."""
    rows = []
    for run in entries:
        config = runs.digest(run_folder.read_config(run.folder) or {})
        saved = [
            _digest_of(run.folder / run_folder.CHECKPOINTS / str(s))
            for s in run_folder.steps(run.folder)
        ]
        rows += [[run.name, config, *cells] for cells in saved or [('-', '-', 'nothing saved')]]
    explanation = (
        'The last column is the SHA-256 of `checkpoints/STEP/manifest.json`, which lists the '
        'hashes of all files of the step; `inspect --verify` compares the files with them.'
    )
    head = ['run', 'config', 'step', 'files', 'SHA-256']
    return [TableBlock([head, *rows]), Text(explanation)]


def _digest_of(step: paths.Path) -> tuple[str, str, str]:
    content = paths.read_bytes(step / run_folder.MANIFEST)
    count = len(run_folder.read_manifest(step))
    return step.name, str(count), hashlib.sha256(content).hexdigest()
