"""A ViT on packed rows: patches of several images of mixed sizes, as NaViT (arXiv:2307.06304)."""
