"""Beside full saves: snapshots in memory, records of every step, a mirror of the root."""
