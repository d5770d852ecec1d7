"""Source `limestone`: data directories of Limestone."""
