"""Sweeps: many runs of one config, kept as an Optuna study that any number of workers share.

space      a sweep file: a base config, points or ranges, search and pruner; the cost of its runs
isoflop    a family of shapes, each trained with several budgets of FLOPs
search     searches and pruners by name
cooldowns  trunks at a constant rate with branches of several lengths
asha       successive halving, which pauses trials; trials that branch off from others
study      a study in its storage, and the folder that all its workers share
worker     claim a trial -> train -> report, until none is left
picture    progress of a study, its best trial, and pictures of its trials
"""
