"""Trained models: loading, reading of a user's inputs, predictions and attention maps."""
