"""Checkpoints of others: read as ours, written as theirs, described by rules; `looking` opens any."""
