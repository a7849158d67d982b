"""The differential tier: a record of every optimizer step, from which the step can be done again."""
