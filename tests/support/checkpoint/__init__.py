"""Trainings that are interrupted, files that fail, savers and readers beside each other."""
