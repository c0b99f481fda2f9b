"""Trained models as commands read them, and inputs of a user made into theirs."""
