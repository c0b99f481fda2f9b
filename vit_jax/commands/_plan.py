"""The runs of a sweep or a config, priced: from config files to `scaling.plan.Run`."""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING, Any

from vit_jax.commands.benchmark import example_spec
from vit_jax.config import construct, durations, fill, sections
from vit_jax.config import load as config_lib
from vit_jax.errors import UserError
from vit_jax.sweeps import space

if TYPE_CHECKING:
    from vit_jax.data.buckets import Buckets
    from vit_jax.profiling.plan import Run

COMMAND = 'scaling plan'


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What runs, what stands in for its data, and what it runs on."""
    add = parser.add_argument
    add('file', nargs='?', metavar='FILE[:ARG]', help='a sweep; it is executed')
    add('--examples', type=float, metavar='N', help="of an epoch, without the config's data")
    add('--image-size', type=int, metavar='PIXELS', help='square images, likewise')
    add('--device', default='TPU v3', metavar='KIND', help='as JAX names it (default: %(default)s)')
    add('--mfu', type=float, default=0.4, help='share of its peak (default: %(default)s)')


def read_runs(args: argparse.Namespace, config: Any | None) -> list[Run]:
    """What the flags name, priced.

    Args:
      args: of `add_flags`.
      config: of `--config`, instead of a sweep.

    Raises:
      UserError: for neither or both, a mistake in them, or data that are neither known nor here.
    """
    if (config is None) == (args.file is None):
        raise UserError(f'{COMMAND} needs one of FILE[:ARG] (a sweep) and --config FILE[:ARG]')
    if args.examples is not None and args.examples < 1:
        raise UserError(f'--examples {args.examples:g}: must be at least 1')
    if config is not None:
        return [price({}, config, args)]
    sweep = space.load(args.file, COMMAND)
    runs = [price(point, vary(sweep, point), args) for point in sweep.points]
    if chosen := len(sweep.queue()) - len(sweep.points):
        point = dearest(sweep, args)
        runs.append(price(point, vary(sweep, point), args, chosen))
    return runs


def vary(sweep: space.Sweep, point: space.Point) -> Any:
    """The config of a point."""
    changes = [*space.overrides(sweep.overrides), *space.overrides(point)]
    return config_lib.load(sweep.config, changes)


def dearest(sweep: space.Sweep, args: argparse.Namespace) -> space.Point:
    """Of what a search may choose, in each dimension the end that costs most."""
    centre, *others = space.corners(sweep)
    best = {name: (cost(sweep, centre, args), value) for name, value in centre.items()}
    for point in others:
        for name in centre:
            if point[name] != centre[name]:
                best[name] = max(best[name], (cost(sweep, point, args), point[name]))
    return {name: value for name, (_, value) in best.items()}


def cost(sweep: space.Sweep, point: space.Point, args: argparse.Namespace) -> float:
    """FLOPs of one run."""
    return price(point, vary(sweep, point), args).flops


def price(point: space.Point, config: Any, args: argparse.Namespace, count: int = 1) -> Run:
    """What `count` runs of the config cost; data are opened only if nothing else tells."""
    from vit_jax.profiling import plan

    data = read_text(config, args) if config.data.get('buckets') else None
    kinds = [(shape.rows * shape.share, shape.spec) for shape in data.shapes] if data else []
    kinds = kinds or [(config.batch_size, image_spec(config, args.image_size))]
    examples = data.num_examples if data else epoch_size(config, args.examples)
    each = data.examples_per_step if data else config.batch_size
    model, task = construct.model_and_task(config)
    measured = [(n, measure(model, task, tuple(sorted(spec.items())))) for n, spec in kinds]
    forward = sum(n * flops for n, (_, flops) in measured) / each
    begun = config.get('branch', {}).get('step', 0)
    steps = durations.of_run(config, each, examples).total_steps - begun
    tokens = data.tokens_per_step if data else 0
    return plan.Run(point, measured[0][1][0], steps, each, forward, count, tokens)


def read_text(config: Any, args: argparse.Namespace) -> Buckets:
    """The sequences in buckets; the model's size of the vocabulary is filled in.

    Raises:
      UserError: if the data or the vocabulary are not here: nothing else tells the lengths.
    """
    if args.examples is not None or args.image_size is not None:
        raise UserError('--examples and --image-size are of images, and this config is of text')
    data = _read_text(config_lib.to_json(config.data), config.batch_size)
    fill.vocab_size(config, data.info.vocab_size)
    return data


@functools.cache
def _read_text(section: str, batch_size: int) -> Any:
    """The data of `config.data` as JSON."""
    from vit_jax.data.dataset import open_dataset

    try:
        return open_dataset(batch_size, **sections.keywords(config_lib.from_json(section)))
    except UserError as e:
        raise UserError(f'{e}; {COMMAND} reads the lengths of all sentences') from e


def image_spec(config: Any, image_size: int | None) -> dict[str, Any]:
    """What an example is like for the model, whose number of classes is filled in.

    Raises:
      UserError: as `example_spec` and `open_source`.
    """
    if image_size is not None:
        return example_spec(config, image_size, None)
    from vit_jax.data import transforms
    from vit_jax.data.fixed import FixedShapes

    source = open_source(config.data)
    fill.num_classes(config, source.info.num_classes)
    parsed = transforms.parse_transforms(config.data.get('transforms', ''))
    return dict(FixedShapes(source, parsed, 1).shapes[-1].spec)


def epoch_size(config: Any, examples: float | None) -> int:
    """Of the training data, as far as the length of training depends on it, else 1."""
    if examples is not None:
        return round(examples)
    _, unit = durations.parse_duration(config.total, 'config.total')
    return len(open_source(config.data)) if unit == 'epochs' else 1


def open_source(section: Any) -> Any:
    """The source of a data section, or what stands in for it.

    Raises:
      UserError: if it is neither here nor known.
    """
    from vit_jax.data import known

    try:
        source = known.open_source(section.source, section.split)
    except UserError as e:
        raise UserError(f'{e}; or give --examples and --image-size to do without data') from e
    return source.only_classes(section.classes) if 'classes' in section else source


@functools.cache
def measure(model: Any, task: Any, spec: tuple[tuple[str, Any], ...]) -> tuple[int, int]:
    """How many parameters a model has, and the FLOPs of its forward pass on one example."""
    import jax

    from vit_jax import step
    from vit_jax.profiling import benchmark

    one = benchmark.blank_example(dict(spec))
    params = jax.eval_shape(lambda: step.init_variables(model, task, one, 0))['params']
    forward = benchmark.forward_flops(model, task, dict(spec))
    return sum(leaf.size for leaf in jax.tree.leaves(params)), forward
