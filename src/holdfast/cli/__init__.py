"""The command line: `verbs` says how each verb is called, and the file of its name does it, loaded then."""
