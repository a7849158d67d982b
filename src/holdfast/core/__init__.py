"""A checkpoint as bytes: layouts, digests, the format, stores, ranks that agree, committed steps."""
