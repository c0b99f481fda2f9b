"""Configs: loading, flags, what is checked before anything runs, durations."""
