"""A system outside of the package: it finds colored spots in gray images."""
