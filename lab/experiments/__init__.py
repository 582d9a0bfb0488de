"""Experiments: measurements of the lab itself, beside the lessons. Each is `python -m lab.experiments.NAME`."""
