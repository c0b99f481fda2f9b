"""Which solver matches objects to predictions fastest inside of a compiled step.

    python tests/bench/matching.py --threads 1

Compares `vit_jax.ops.boxes` with `optax.assignment` and with scipy behind `jax.pure_callback`,
which take turns in one process. Costs are `contested` where every object prefers the same
predictions, so that many are reassigned, as at the beginning of training, else `independent`.
`--devices 8` splits the images among as many devices of the host.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--images', type=int, default=16)
    parser.add_argument('--layers', type=int, default=6, help='decoder layers, each matched anew')
    parser.add_argument('--queries', type=int, default=100)
    parser.add_argument('--padded', type=int, nargs='+', default=[20, 100], help='objects a row')
    parser.add_argument('--objects', type=float, default=7, help='mean number that are real')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--devices', type=int, default=1)
    args = parser.parse_args()
    flags = f'--xla_force_host_platform_device_count={args.devices}'
    if args.threads == 1:
        flags += ' --xla_cpu_multi_thread_eigen=false'
        os.environ['OMP_NUM_THREADS'] = '1'
    os.environ['XLA_FLAGS'] = flags
    compare(args)


def compare(args: argparse.Namespace) -> None:
    """Prints a line for each kind of costs and size: milliseconds a batch, by solver."""
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ('data',))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    solvers = {name: jax.jit(solver) for name, solver in make_solvers().items()}
    print('costs', 'padded to', 'largest', *solvers, sep='\t')
    for kind in ('contested', 'independent'):
        for padded in args.padded:
            cost, real = make_costs(kind, args, padded)
            inputs = jax.device_put((cost, real), split)
            times: dict[str, list[float]] = {name: [] for name in solvers}
            sums = {name: total(cost, np.asarray(f(*inputs))) for name, f in solvers.items()}
            np.testing.assert_allclose(list(sums.values()), sums['scipy'], rtol=1e-4)
            for _ in range(args.rounds):
                for name, solver in solvers.items():
                    start = time.perf_counter()
                    jax.block_until_ready(solver(*inputs))
                    times[name].append(1e3 * (time.perf_counter() - start))
            medians = [f'{statistics.median(t):.2f}' for t in times.values()]
            print(kind, padded, real.sum(-1).max(), *medians, sep='\t', flush=True)


def total(cost, places) -> float:
    """The sum of the costs of the pairs."""
    import numpy as np

    chosen = np.take_along_axis(cost, places[..., None].clip(0), axis=-1)[..., 0]
    return float(chosen[places >= 0].sum(dtype=np.float64))


def make_costs(kind: str, args: argparse.Namespace, padded: int):
    """Costs [B L N Q], and which objects are real [B L N], as many in every layer of an image."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (args.images, args.layers, padded, args.queries)
    cost = rng.normal(size=shape)
    if kind == 'contested':
        cost += 0.1 * np.arange(args.queries)
    # COCO: many images with few objects, few with many.
    counts = rng.geometric(1 / args.objects, args.images).clip(max=min(padded, args.queries))
    real = np.arange(padded) < counts[:, None, None]
    return cost.astype(np.float32), np.broadcast_to(real, shape[:3])


def make_solvers():
    """Functions (cost [B L N Q], real [B L N]) -> prediction of each object, -1 for padding."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from scipy.optimize import linear_sum_assignment

    from vit_jax.ops.boxes import match

    def by_optax(cost, real):
        def one(cost, real):
            # Padding takes what is left over, at no cost.
            rows, columns = optax.assignment.hungarian_algorithm(jnp.where(real[:, None], cost, 0))
            places = jnp.full(len(cost), -1, jnp.int32).at[rows].set(columns.astype(jnp.int32))
            return jnp.where(real, places, -1)

        return jax.vmap(jax.vmap(one))(cost, real)

    def on_host(cost, real):
        places = np.full(real.shape, -1, np.int32)
        for image in np.ndindex(*real.shape[:-1]):
            count = int(real[image].sum())
            rows, columns = linear_sum_assignment(np.asarray(cost[image][:count]))
            places[image][rows] = columns
        return places

    def by_scipy(cost, real):
        shape = jax.ShapeDtypeStruct(real.shape, jnp.int32)
        return jax.pure_callback(lambda c, r: on_host(*map(np.asarray, (c, r))), shape, cost, real)

    return {'ours': match, 'optax': by_optax, 'scipy': by_scipy}


if __name__ == '__main__':
    main()
