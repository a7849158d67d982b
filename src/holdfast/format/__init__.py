"""The format: manifest, image, element types, extras.  Pure; docs/format.md is normative."""
