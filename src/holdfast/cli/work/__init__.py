"""What verbs do and show.  Each is imported once its verb is called, so that `--help` imports none."""
