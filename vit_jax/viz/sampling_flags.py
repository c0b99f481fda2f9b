"""Flags of samples of coarse colors, apart from their pictures, for a parser without JAX."""

import argparse


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the number of samples and sampling options."""
    add = parser.add_argument
    add('--samples', type=int, metavar='N', help="samples per image (default: the task's, 3)")
    add(
        '--temperature',
        type=float,
        help="temperature, below 1 for likelier colors (default: the task's)",
    )
    add(
        '--top-k',
        type=int,
        metavar='K',
        help='number of likeliest colors of a pixel to sample from',
    )
