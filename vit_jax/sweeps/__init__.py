"""Sweeps: many runs of one config, kept as an Optuna study that any number of workers share.

space     what a sweep file says: a base config, points or ranges, how to search and to prune
search    searches and pruners by name; `cma_es` is one of them
study     a study in its storage, and the folder that all its workers share
claims    whose a trial is, from its claim to its end
worker    claim a trial -> train -> tell, until none is left
status    how far it has come: trials, workers, the best
picture   the course of its trials, and their values over each dimension
"""
