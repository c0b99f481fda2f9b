"""List a model's parameters and count its FLOPs, or verify the saved steps of a run."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands._model import MODEL, MODEL_FLAGS
from vit_jax.commands._parser import Parser, add_allow_flag, add_json_flag, add_subject, align
from vit_jax.commands.benchmark import add_size_flags
from vit_jax.config.load import model_and_task, parse_config_args, section
from vit_jax.config.origin import dotted_names
from vit_jax.config.run import Lora, Model, Step
from vit_jax.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from vit_jax.storage.paths import Path


@dataclasses.dataclass(frozen=True)
class InspectedModel:
    """Model to inspect.

    Attributes:
      config: Config of the model.
      variables: Collections of arrays, or of their shapes.
      spec: Arrays of one example; empty if unknown.
      note: Reason why FLOPs cannot be counted; empty if they can.
      remarks: Lines about the parameters.
    """

    config: Any
    variables: Mapping[str, Any]
    spec: Mapping[str, Any]
    note: str = ''
    remarks: Sequence[str] = ()


def main(argv: Sequence[str]) -> int:
    """Print parameters, their total, and FLOPs per example, or a table of saved steps.

    Raises:
      UserError: Not exactly one model, config or run is named.
    """
    parser = Parser('inspect', __doc__)
    alternatives = (*MODEL_FLAGS, '--config', '--verify')
    add_subject(parser, argv, 'model', alternatives, nargs='?', metavar='MODEL', help=MODEL)
    parser.add_argument('--workdir', metavar='RUN', help='same as MODEL, for runs only')
    parser.add_argument('--checkpoint', metavar='FILE', help='same as MODEL')
    parser.add_argument(
        '--verify',
        metavar='WORKDIR',
        help='compare all saved steps of a run with their digests; exit 1 if one differs',
    )
    parser.add_argument('--unfold', action='store_true', help='show identical blocks one by one')
    add_json_flag(parser, ', with every block')
    add_allow_flag(parser)
    add_size_flags(parser)
    args, config = parse_config_args(parser, argv, positional=False)
    subjects = (config, args.model, args.workdir, args.checkpoint, args.verify)
    if sum(x is not None for x in subjects) != 1:
        raise UserError(
            'inspect needs one of MODEL, --config CONFIG, --workdir RUN, --checkpoint FILE and '
            '--verify RUN'
        )
    if args.verify is not None:
        return verify(args.verify, args.json)
    from vit_jax.inference import load

    if config is not None:
        subject = from_config(config, args.image_size, args.channels)
    else:
        if args.workdir is not None:
            load.read_config(args.workdir, args.allow)
        path = next(x for x in (args.model, args.workdir, args.checkpoint) if x is not None)
        subject = from_checkpoint(path, args.image_size, args.channels, args.allow)
    config_modules = [] if config is None else [name for _, name in dotted_names(config)]
    result = make_report(subject, [*args.allow, *config_modules])
    print(json.dumps(result)) if args.json else print_tables(result, args.unfold)
    return 0


def verify(workdir: str, as_json: bool) -> int:
    """Compare every file of every kept step with its digest, and print a line per step.

    Returns:
      The exit code: 1 if a step is damaged or unfinished.

    Raises:
      UserError: The run does not have a saved step.
    """
    from vit_jax.storage import paths, run_folder

    root = paths.path(workdir) / run_folder.CHECKPOINTS
    steps = run_folder.step_numbers(root)
    faults = {step: find_fault(root / str(step)) for step in steps}
    if not faults:
        raise UserError(f'{root} does not contain a saved step')
    if as_json:
        print(json.dumps({'steps': faults}))
    else:
        lines = [('step', 'state')]
        lines += [(str(step), reason or 'intact') for step, reason in faults.items()]
        print(align(lines, left=2))
    return EXIT_FAILED if any(faults.values()) else 0


def find_fault(directory: Path) -> str:
    """Describe the fault of a saved step in one line; empty if it is intact."""
    from vit_jax.checkpoints import manifest
    from vit_jax.storage import run_folder

    try:
        manifest.verify(directory)
    except run_folder.Damaged as error:
        return f'damaged: {error}'
    except run_folder.Unfinished as error:
        return f'unfinished: {error}'
    return ''


def from_config(config: Any, image_size: int | None, channels: int | None) -> InspectedModel:
    """Build the model of a config: only shapes."""
    import jax

    from vit_jax import step
    from vit_jax.inference import fine_tune
    from vit_jax.optim import lora
    from vit_jax.profiling import benchmark
    from vit_jax.profiling.batch_spec import row_of

    config, spec, _ = row_of(fine_tune.complete_config(config).config, image_size, channels)
    model, task = model_and_task(config)
    example = benchmark.blank_example(spec)
    variables = jax.eval_shape(lambda: step.init_variables(model, task, example, 0))
    settings, remarks = section(config, Lora), []
    if settings.is_used:
        adapters, params = lora.make_adapters(settings, model, variables['params'])
        variables, remarks = {**variables, 'params': params}, adapters.remarks(params)
    return InspectedModel(config, variables, spec, remarks=remarks)


def from_checkpoint(
    path: str, image_size: int | None, channels: int | None, allowed: Sequence[str]
) -> InspectedModel:
    """Read a trained model, optionally for a different image size."""
    from vit_jax.inference import images, load
    from vit_jax.profiling.batch_spec import row_of

    size = (image_size, image_size) if image_size else None
    trained = load.read(path, image_size=size, allowed=allowed)
    trained = load.adapt_model(trained, size) if trained.step is None else trained
    config, spec, note = trained.config, {}, ''
    try:
        if trained.step is None:
            spec = images.example_spec(trained, size or images.input_size(trained))
        else:
            config, spec, _ = row_of(config, image_size, channels)
    except UserError as e:
        note = str(e)
    return InspectedModel(config, trained.variables, spec, note)


def make_report(subject: InspectedModel, allowed: Sequence[str] = ()) -> dict[str, Any]:
    """Collect the output as JSON values."""
    import jax

    tables = {name: rows(tree) for name, tree in subject.variables.items()}
    result: dict[str, Any] = {
        'model': section(subject.config, Model).name,
        'parameters': tables.pop('params'),
        'collections': tables,
        'note': subject.note,
        'remarks': list(subject.remarks),
    }
    result['total'] = sum(row['count'] for row in result['parameters'])
    if subject.spec:
        from vit_jax.inference import frozen
        from vit_jax.profiling import task_flops

        model, task = model_and_task(subject.config)
        try:
            task = frozen.attach(task, allowed).task
        except UserError as e:
            return result | {'note': str(e)}
        batch = {k: jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for k, s in subject.spec.items()}
        inputs = jax.tree.leaves(jax.eval_shape(task.inputs, batch))
        forward = task_flops.training_flops(model, task, subject.spec).forward
        train = task_flops.step_flops(section(subject.config, Step).sam, model, task, subject.spec)
        result['inputs'] = [list(x.shape[1:]) for x in inputs]
        result['flops'] = {'forward': forward, 'train': train}
    return result


def rows(tree: Any) -> list[dict[str, Any]]:
    """List path, shape, dtype and size of every array of a tree, in natural order."""
    import jax

    from vit_jax.tree_paths import path_name

    arrays = [
        {
            'path': path_name(path),
            'shape': list(leaf.shape),
            'dtype': str(leaf.dtype),
            'count': int(leaf.size),
        }
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return sorted(arrays, key=lambda row: natural_order(row['path']))


def natural_order(path: str) -> list[tuple[str, int]]:
    """Make a sort key for paths that puts block_10 after block_9."""
    return [(text, int(number or 0)) for text, number in re.findall(r'(\D+)(\d*)', path)]


def print_tables(result: Mapping[str, Any], unfold: bool) -> None:
    """Print parameters, other collections and totals; identical blocks share a row by default."""
    from vit_jax.profiling import flops
    from vit_jax.runtime.console import Console, Table

    console = Console()
    for name, entries in {'parameter': result['parameters'], **result['collections']}.items():
        table = Table()
        table.add_column(name, no_wrap=True)
        table.add_column('shape', no_wrap=True)
        table.add_column('dtype')
        table.add_column('', justify='right')
        table.add_column('count', justify='right')
        for row in entries if unfold else flops.fold_repeats(entries):
            shape = ' x '.join(map(str, row['shape'])) or 'scalar'
            times = f'x{row["times"]}' if row.get('times', 1) > 1 else ''
            table.add_row(row['path'], shape, row['dtype'], times, f'{row["count"]:,}')
        console.print(table)
        console.print()
    console.print(f'{result["model"]}: {result["total"]:,} parameters')
    for line in result['remarks']:
        console.print(line)
    if 'flops' in result:
        sizes = ', '.join(str(list(shape)) for shape in result['inputs'])
        forward, train = (result['flops'][k] / 1e9 for k in ('forward', 'train'))
        console.print(
            f'one example of {sizes}: {forward:,.4g} GFLOP forward, {train:,.4g} to train'
        )
    elif result['note']:
        console.print(f'FLOPs are unknown: {result["note"]}')
