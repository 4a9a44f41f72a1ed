"""``run.step`` beside the loop that it stands for."""
