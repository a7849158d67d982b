"""What to protect, how, and how often.  Pure."""
