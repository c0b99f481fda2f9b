"""Optimizers, schedules, and what differs between parameters by their paths."""
