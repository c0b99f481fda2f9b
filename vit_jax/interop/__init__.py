"""Checkpoints of other code bases, read and written."""
