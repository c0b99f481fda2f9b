"""Plans and transforms that a user adds without changing the package."""
