"""Judges of directories: the data that a server recovers from the files in them. Nothing here imports the code under
test.
"""
