"""What runs on one rank: stages as programs, their weights' versions, their updates and their budget."""
