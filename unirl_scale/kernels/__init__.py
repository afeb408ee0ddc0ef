"""Arithmetic: one op table per vendor; `reference.py` is the plain-torch truth for every op."""
