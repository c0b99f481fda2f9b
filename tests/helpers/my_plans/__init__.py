"""Plans and transforms that a user adds, without a change of the package."""
