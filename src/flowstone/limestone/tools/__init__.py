"""Tools for data directories that no program uses: inspection, repair, listing, compaction."""
