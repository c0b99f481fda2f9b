"""My lab's viz."""
