"""What holds for all tests."""

from hypothesis import settings

settings.register_profile("holdfast", deadline=None)  # a busy machine is no failure
settings.load_profile("holdfast")
