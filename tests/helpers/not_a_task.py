"""A class of the right name that is derived from nothing."""


class Task:
    """No task."""
