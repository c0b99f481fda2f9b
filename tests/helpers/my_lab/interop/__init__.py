"""My lab's interop."""
