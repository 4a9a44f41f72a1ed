"""Plans of training steps on one device: what a step keeps, moves and computes again."""
