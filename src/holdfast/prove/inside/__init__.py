"""Runs in the processes of a training under `holdfast prove`: observes each optimizer step, and reports."""
