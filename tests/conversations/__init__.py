"""Recorded conversations of real servers, replayed with a Flowstone node on either end."""
