"""Codecs over bytes.  Pure."""
