"""A system outside of the package: it finds coloured spots in grey images."""
