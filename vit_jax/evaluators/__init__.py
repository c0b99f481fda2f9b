"""Measures that need more than one pass of sums: they see predictions on the host.

A plain name in `config.evals.NAME.evaluator` is a module of this package, a dotted one a
module of one's own; either has a class `Evaluator`, made anew for every evaluation. The
keywords of its constructor stand in the section of the config. It has

    fit(predictions, batch)     optional: once a batch of the section's `fit` split, and before
    update(predictions, batch)  once a batch of the section's `split`
    result() -> {name: float}   after the last batch
    read(texts, vocab)          optional: first of all, for data in buckets that are text: the
                                strings of every example, before ids were made of them by `vocab`
    signature                   optional, a string: by which rules the numbers are made
    check(size, num_classes)    optional: raises UserError if so many examples of the `fit` split
                                cannot be enough; called before anything is computed

where `predictions` is what `predict` of the task returns and `batch` what the model did not
take: both numpy arrays of the same real examples, from all processes, without padding.
"""
