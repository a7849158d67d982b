"""Trainers of others over holdfast: a module for each, which is imported when it is asked for."""
