"""Decisions on redundancy and frequencies, with their models.  No I/O."""
