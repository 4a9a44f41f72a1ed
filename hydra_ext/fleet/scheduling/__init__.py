"""What runs how, where and when: trials, plans, and the scheduler that carries them out."""
