"""Spec strings: objects that are parsed from a text such as `topk:ratio=0.01`, and print as the same text. Independent
of compressors."""
