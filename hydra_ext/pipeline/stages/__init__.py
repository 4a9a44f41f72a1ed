"""The stages of one rank: their programs, the versions of their weights, their updates and their budget."""
