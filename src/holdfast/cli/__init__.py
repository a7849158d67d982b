"""The command line: `verbs` says how each verb is called; a file for each, loaded when it is called, does it."""
