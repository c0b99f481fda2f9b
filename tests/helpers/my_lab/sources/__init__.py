"""My lab's sources."""
