"""Of my lab."""
