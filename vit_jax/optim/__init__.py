"""Optimizers, schedules, and parameter groups by path."""
