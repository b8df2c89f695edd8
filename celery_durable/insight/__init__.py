"""Answers for people about instances: what they did, how many there are, and why one does not move.

It reads through the core, and nothing in the core uses it.
"""
