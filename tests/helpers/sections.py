"""Sections of a config from keywords, as its files write them, and what is made of them."""

from vit_jax.config import schema
from vit_jax.config.run import Durations, Optim, Schedule
from vit_jax.optim import make, schedules


def section(cls, **keys):
    """A section, whose groups are dicts."""
    return schema.make_section(cls, keys, f'config.{cls.__name__.lower()}')


def times(total, epoch_size=1):
    """The durations of a run with one example a step."""
    return Durations(1, epoch_size, total)


def optimizer(params, total, layers=(), factors=None, **keys):
    """The transformation and the learning rate of an optimizer section."""
    return make.make_optimizer(params, section(Optim, **keys), times(total), layers, factors)


def schedule(peak, total, **keys):
    """The function of a schedule section."""
    return schedules.make_schedule(section(Schedule, **keys), peak, times(total))
