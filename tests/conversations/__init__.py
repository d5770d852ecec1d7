"""Recorded conversations of real servers, played again with a Flowstone node on either end."""
