"""Run folders on disks and in object storage: paths, whole files, locks, what lies in them."""
