"""One trainer: build what a config describes, start or resume, and loop."""
