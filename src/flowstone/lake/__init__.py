"""Tables of a lake and their files: schemas, row changes, masks, and the engine that needs no JVM."""
