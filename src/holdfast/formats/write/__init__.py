"""Writers: plans of the files that another system loads."""
