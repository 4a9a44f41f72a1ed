"""Embedding tables whose rows move, not the tables: which weights are tables, and what looks rows up in them."""
