"""Metrics that are not sums over examples, computed from predictions on the host.

A plain name in `config.evals.NAME.evaluator` is a module of this package, a dotted one the user's
own. Either has a class `Evaluator` derived from `base.Evaluator`; the keywords of its
constructor are in the same section of the config.
"""
