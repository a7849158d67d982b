"""Choices of what to protect, how, and how often.  Pure."""
