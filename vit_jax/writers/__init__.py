"""Writers of a run's numbers and pictures to other services, one module for each.

A module has a class `Writer` derived from `base.Writer`, which documents when methods are called.
"""
