"""The format: manifest, image, element types, extras.  Pure; docs/reference/format.md is normative."""
