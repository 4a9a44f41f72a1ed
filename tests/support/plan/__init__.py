"""Planning problems that are made up, and what a plan of them costs, worked out apart from the package."""
