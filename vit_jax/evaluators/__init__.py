"""Measures that need more than sums over examples: they see the predictions on the host.

A plain name in `config.evals.NAME.evaluator` is a module of this package, a dotted one a module of
the user's own. Either has a class `Evaluator` derived from `base.Evaluator`; the keywords of its
constructor stand in the same section of the config.
"""
