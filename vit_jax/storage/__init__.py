"""Folders on disks and in object storage: paths, whole files, locks."""
