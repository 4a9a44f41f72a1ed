"""Code that names other libraries and model families. No other part of the package does."""
