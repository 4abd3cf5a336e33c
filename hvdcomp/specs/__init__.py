"""Spec strings: descriptions that print as they are parsed. Knows no compressor and no policy."""
