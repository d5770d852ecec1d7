"""Commands on data directories of Limestone."""
