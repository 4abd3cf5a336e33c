"""Compares predicted and measured step times on emulated hosts, for docs/exchange-measured.md."""
