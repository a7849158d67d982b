"""Writers: a checkpoint planned as the files that another system loads."""
