"""A model that is a function, for tasks that are tested without one."""

from vit_jax.step import AFTER_TRAINING


class Given:
    """`tasks.base.Apply` of a function of the inputs."""

    train, step, frozen = False, AFTER_TRAINING, {}

    def __init__(self, function):
        self.function = function

    def __call__(self, *inputs, method=None, **options):
        return self.function(*inputs, **({'method': method} if method else {}), **options)

    average = __call__
