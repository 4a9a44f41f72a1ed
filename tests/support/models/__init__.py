"""Small models of many families, and operations on their parameters."""
