"""Heads in rows: logits that are computed, and go backward, a part at a time, with the bits of the whole."""
