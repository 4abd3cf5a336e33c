"""Embedding tables: the exchange of their rows, tables that are sharded over the ranks, and an optimizer for tables."""
