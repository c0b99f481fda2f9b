"""My lab's models."""
