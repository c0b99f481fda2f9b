"""A system in a package of its own: DINO, image features without labels."""
