"""The tier contract's room of the kit."""
