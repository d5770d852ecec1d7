"""The wire format: packets, keys, request types, errors, greeting, authentication, MessagePack extensions.

Pure functions over bytes. Nothing here keeps state, opens files or sockets, or knows what a space is.
"""
