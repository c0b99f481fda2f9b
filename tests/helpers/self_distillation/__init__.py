"""A system outside of the package: features of images without labels, by DINO."""
