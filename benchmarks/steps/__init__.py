"""Predicted beside measured times of steps, on emulated hosts: docs/exchange-measured.md."""
