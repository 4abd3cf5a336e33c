"""Spec strings: descriptions that are parsed from text and print as that text. Independent of compressors."""
