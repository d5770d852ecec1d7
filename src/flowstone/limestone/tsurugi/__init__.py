"""Tsurugi's SQL tables in a Limestone log: their definitions, and the rows in keys and values of entries."""
