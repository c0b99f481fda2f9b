"""A system in a package of its own: images and captions, each encoded by its own tower."""
