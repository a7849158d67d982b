"""The memory tier: snapshots in host memory that outlive the training processes."""
