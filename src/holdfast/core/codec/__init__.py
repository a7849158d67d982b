"""Digests, erasure codes and packing of bytes.  No I/O."""
