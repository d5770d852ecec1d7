"""Judges of directories: what a server makes of the files in them. Nothing here imports the code under test."""
