"""A system in a package of its own: finds colored spots in gray images."""
