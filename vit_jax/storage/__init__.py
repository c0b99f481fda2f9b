"""Run folders on disks and in object storage: paths, atomic files, locks, contents."""
