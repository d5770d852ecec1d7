"""Changes of the schema: the functions of box.schema, and what rows of system spaces do to the box."""
