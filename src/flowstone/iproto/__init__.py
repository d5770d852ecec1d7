"""The wire format: packets, keys, request types, errors, greeting, authentication, MessagePack extensions.

Pure functions over bytes. Nothing here holds state, opens anything or knows what a space is.
"""
