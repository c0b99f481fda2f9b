"""Sweeps: many runs of one config, kept as an Optuna study that any number of workers share.

space     the contents of a sweep file: a base config, points or ranges, search and pruner
search    searches and pruners by name; `cma_es` is one of them
study     a study in its storage, and the folder that all its workers share
claims    the owner of a trial, from its claim to its end
worker    claim a trial -> train -> report, until none is left
status    progress of a study: trials, workers, the best
picture   the course of its trials, and their values over each dimension
"""
