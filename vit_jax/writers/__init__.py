"""Where the numbers of a run go besides its folder: one module for each service.

A module has a class `Writer` derived from `base.Writer`, which says when its methods are called.
"""
