"""The operations of UPDATE and UPSERT."""
