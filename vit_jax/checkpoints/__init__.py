"""Checkpoints: written in the background, complete or absent, verified when read."""
