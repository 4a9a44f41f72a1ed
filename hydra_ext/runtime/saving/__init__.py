"""What a run saves, how it goes on from there, and what SIGTERM does."""
