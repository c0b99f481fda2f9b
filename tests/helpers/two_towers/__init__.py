"""A system outside of the package: images and captions, each in a tower of its own."""
