"""Configs: loading, flags, validation, durations."""
