"""My lab's tasks."""
