"""Changes of the schema: the functions of box.schema, and the effects of rows of system spaces on the box."""
