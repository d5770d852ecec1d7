"""`flowstone.follow`: a read-only replica inside a program, with only settled transactions."""
