"""What knows other libraries and model families by name. Nothing else in the package does."""
