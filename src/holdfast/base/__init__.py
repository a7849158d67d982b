"""The ground: errors, events, threads, deadlines, checks of arguments, messages between processes."""
